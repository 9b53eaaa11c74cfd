"""The compiled CPU kernels against the torch backend; and beyond it, that the bits of a row are its own."""

import subprocess
import sys

import pytest
import torch

from kernels_integration import gumbel_max as gumbel_max_module
from kernels_integration.backend import Routing
from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.native.build import BuildError, library_path
from kernels_integration.native.library import is_available, loaded
from kernels_integration.philox import Purpose
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.rows import RowBatch, RowGroup
from kernels_integration.weight import Weight

if not is_available():
    pytest.skip("no C compiler", allow_module_level=True)

from kernels_integration.native.backend import NativeBackend

GENERATOR = torch.Generator().manual_seed(7)
DTYPES = [torch.float32, torch.bfloat16]
SOLO = DcpGroup(1, SoloCollectives())


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def backends(dtype):
    return NativeBackend(dtype), TorchBackend(dtype)


def close(actual, expected, dtype, scale=1.0):
    """Within two roundings of dtype, and what float32 loses in a sum."""
    assert actual.dtype == expected.dtype
    relative = 2**-7 if dtype is torch.bfloat16 else 2e-5
    torch.testing.assert_close(actual.double(), expected.double(), rtol=relative, atol=relative * scale)


def decode_rows(num_rows, length, num_slots):
    """One row a request, each of its own slots and length."""
    return RowBatch(
        positions=torch.full((num_rows,), length - 1),
        visible_from=torch.arange(num_rows) % 3,
        visible_to=length - torch.arange(num_rows) % 7,
        write_rows=torch.arange(num_rows),
        write_slots=torch.randperm(num_slots, generator=GENERATOR)[:num_rows],
        groups=(
            RowGroup(
                row_start=0,
                num_requests=num_rows,
                rows_per_request=1,
                kv_slots=torch.randint(num_slots, (num_rows, length), generator=GENERATOR),
                kv_positions=torch.arange(length),
            ),
        ),
        max_visible=length,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(384, 256), (77, 100), (1, 3), (130, 33)])
def test_linear(dtype, shape):
    native, reference = backends(dtype)
    weight = randn(*shape, dtype=dtype)
    for rows in (0, 1, 5, 6, 7, 40):
        x = randn(rows, shape[1] + 8, dtype=dtype)[:, 3 : 3 + shape[1]]
        close(native.linear(Weight(weight))(x), reference.linear(Weight(weight))(x), dtype, scale=20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(32, 128), (20, 38)])
def test_head_product_and_rotation(dtype, dims):
    native, reference = backends(dtype)
    x = randn(9, 3, dims[0] + 16, dtype=dtype)
    weight = randn(3, *dims, dtype=dtype)
    outs = [torch.zeros(9, 3, dims[1] + 16, dtype=dtype) for _ in range(2)]
    for backend, out in zip((native, reference), outs, strict=True):
        backend.head_product(x[..., : dims[0]], weight, out=out[..., : dims[1]])
        rope = backend.rotary_table(
            torch.arange(9) * 300, torch.rand(8, generator=torch.Generator().manual_seed(1)), 1.5
        )
        backend.rotate(x[..., dims[0] :], rope, out=out[..., dims[1] :])
    close(outs[0], outs[1], dtype, scale=20)
    close(native.head_product(x.float()[..., : dims[0]], weight), outs[1][..., : dims[1]], dtype, scale=20)
    flat = [x[:, 0, :16].clone() for _ in range(2)]
    for backend, values in zip((native, reference), flat, strict=True):
        backend.rotate(values, rope)
    close(flat[0], flat[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [256, 19])
def test_norms_and_swiglu(dtype, dim):
    native, reference = backends(dtype)
    x, h, weight = randn(5, dim + 6, dtype=dtype)[:, 1 : 1 + dim], randn(5, dim, dtype=dtype), randn(dim)
    close(native.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), dtype)
    streams = [h.clone(), h.clone()]
    normed = [
        backend.add_rms_norm(stream, x, weight, 1e-5)
        for backend, stream in zip((native, reference), streams, strict=True)
    ]
    close(normed[0], normed[1], dtype, scale=4)
    assert torch.equal(*streams)
    both = randn(5, 2 * dim, dtype=dtype) * 6
    close(native.swiglu(both), reference.swiglu(both), dtype, scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "groups", "kept"), [(8, 4, 2), (24, 1, 1), (256, 8, 4)])
def test_routing_and_experts(dtype, num_experts, groups, kept):
    native, reference = backends(dtype)
    hidden, width = 64, 40
    routing = Routing(topk=4, num_groups=groups, topk_group=kept, normalise=True, scaling_factor=2.5)
    weight, bias = randn(num_experts, hidden), randn(num_experts) * 0.1
    gate_up = randn(num_experts, 2 * width, hidden, dtype=dtype) * 0.1
    down = randn(num_experts, hidden, width, dtype=dtype) * 0.1
    for rows in (1, 17):
        x = randn(rows, hidden, dtype=dtype)
        chosen, weights = native.route(x, weight, bias, routing)
        order = chosen.argsort(1)
        expected, expected_weights = reference.route(x, weight, bias, routing)
        expected_order = expected.argsort(1)
        assert torch.equal(chosen.gather(1, order), expected.gather(1, expected_order))
        close(weights.gather(1, order), expected_weights.gather(1, expected_order), torch.float32)
        begin, end = num_experts // 4, num_experts  # those before are another rank's
        outs = [
            backend.experts(
                Weight(gate_up[begin:end].clone()),
                Weight(down[begin:end].clone()),
                first_expert=begin,
                num_experts=num_experts,
            )(x, chosen, weights, x.clone())
            for backend in (native, reference)
        ]
        close(outs[0], outs[1], dtype, scale=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_cache_writes(dtype, cache_dtype):
    native, reference = backends(dtype)
    rows, slots = decode_rows(6, 10, 50), []
    latents, keys = randn(6, 48, dtype=dtype), randn(6, 24, dtype=dtype)
    norm, bias = randn(40), randn(24)
    for backend in (native, reference):
        rope = backend.rotary_table(
            torch.arange(6), torch.rand(4, generator=torch.Generator().manual_seed(2)), 1.0
        )
        cache, key_cache = (StoredVectors.plain(torch.zeros(50, dim, dtype=cache_dtype)) for dim in (48, 24))
        backend.write_latents(latents.clone(), norm, 1e-6, rope, cache, rows)
        backend.write_index_keys(keys.clone(), norm[:24], bias, 1e-6, rope, key_cache, rows)
        slots.append((cache.storage, key_cache.storage))
    lowest = dtype if dtype is torch.bfloat16 else cache_dtype
    for written, expected in zip(*slots, strict=True):
        close(written, expected, lowest, scale=4)
    outside = RowBatch(
        **{name: getattr(rows, name) for name in rows.__slots__} | {"write_slots": torch.arange(45, 51)}
    )
    fresh = StoredVectors.plain(torch.zeros(50, 48, dtype=cache_dtype))
    with pytest.raises(IndexError):
        native.write_latents(latents.clone(), norm, 1e-6, rope, fresh, outside)
    assert not fresh.storage.any(), "nothing is written where one slot is outside"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim", "latent_rank"), [(8, 160, 128), (3, 37, 21), (17, 96, 64)])
def test_attention(dtype, heads, dim, latent_rank):
    native, reference = backends(dtype)
    kv = StoredVectors.plain(randn(400, dim, dtype=dtype))
    kv.storage[-1] = torch.nan  # a slot that no row selected
    rows = decode_rows(12, 70, 399)
    rows.visible_to[3] = 0
    plan = reference.plan(reference.select_visible(rows, SOLO))
    for index in (plan.kv_indices.int(), plan.kv_indices.long()):
        plan = plan.with_indices(index)
        q, results = randn(14, heads, dim, dtype=dtype), []
        for backend in (native, reference):
            o, lse = torch.full((14, heads, latent_rank), 5.0), torch.full((14, heads), 5.0)
            backend.attend(plan, q, kv, o, lse, sm_scale=0.2)
            results.append((o, lse))
        (o, lse), (expected_o, expected_lse) = results
        close(o, expected_o, torch.float32, scale=4)
        close(lse, expected_lse, torch.float32, scale=4)
        assert not o[3].any()
        assert (lse[3] == -torch.inf).all()
        assert (o[12:] == 5.0).all(), "rows beyond the plan are not written"
    with pytest.raises(PlanError):
        native.attend(plan, q[:, :, 1:], kv, o, lse, sm_scale=0.2)
    with pytest.raises(IndexError):
        native.attend(plan.with_indices(index + 400), q, kv, o, lse, sm_scale=0.2)


@pytest.mark.parametrize("values", [DTYPES[0], DTYPES[1], "ties", "nan"])
@pytest.mark.parametrize("topk", [1, 16, 64])
def test_selection_is_the_same(values, topk):
    """Ties of zeros go to the lower position; NaN counts as the lowest."""
    dtype = torch.bfloat16 if values is torch.bfloat16 else torch.float32
    native, reference = backends(dtype)
    dim = 16 if values == "ties" else 24  # of 16 every score is exact
    rows, keys = decode_rows(9, 150, 300), StoredVectors.plain(randn(300, dim, dtype=dtype))
    q, weights = randn(9, 5, dim, dtype=dtype), randn(9, 5)
    if values == "ties":
        keys.storage.copy_(keys.storage.sign())
        q, weights = q.sign() * (torch.arange(dim) < 4), weights.sign()
    if values == "nan":
        keys.storage[::3] = torch.nan
    actual, expected = (
        backend.select_topk(q, weights, keys, rows, topk, SOLO) for backend in (native, reference)
    )
    assert torch.equal(actual.kv_indptr, expected.kv_indptr)
    assert torch.equal(actual.kv_indices, expected.kv_indices)


def test_selection_of_chunks():
    """Groups of several rows, and rows that see fewer than topk, or nothing."""
    native, reference = backends(torch.float32)
    groups = tuple(
        RowGroup(
            row_start=start,
            num_requests=2,
            rows_per_request=5,
            kv_slots=torch.randint(300, (2, length), generator=GENERATOR),
            kv_positions=torch.arange(length),
        )
        for start, length in ((0, 40), (10, 90))
    )
    visible_to = torch.tensor([36, 37, 38, 39, 40, 0, 2, 3, 4, 5, 86, 87, 88, 89, 90, 10, 20, 30, 40, 50])
    rows = RowBatch(
        positions=visible_to - 1,
        visible_from=torch.arange(20) % 2,
        visible_to=visible_to,
        write_rows=torch.arange(0),
        write_slots=torch.arange(0),
        groups=groups,
        max_visible=90,
    )
    q, weights, keys = randn(20, 4, 64), randn(20, 4), StoredVectors.plain(randn(300, 64))
    actual, expected = (
        backend.select_topk(q, weights, keys, rows, 16, SOLO) for backend in (native, reference)
    )
    assert torch.equal(actual.kv_indptr, expected.kv_indptr)
    assert torch.equal(actual.kv_indices, expected.kv_indices)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype):
    native = NativeBackend(dtype)
    linear = native.linear(Weight(randn(200, 130, dtype=dtype)))
    experts = native.experts(
        Weight(randn(8, 80, 130, dtype=dtype)),
        Weight(randn(8, 130, 40, dtype=dtype)),
        first_expert=0,
        num_experts=8,
    )
    head_weight = randn(2, 65, 50, dtype=dtype)
    x, chosen = (
        randn(33, 130, dtype=dtype),
        torch.stack([torch.randperm(8, generator=GENERATOR)[:3] for _ in range(33)]),
    )
    weights = randn(33, 3)
    rows = decode_rows(33, 100, 500)
    keys, kv = StoredVectors.plain(randn(500, 65, dtype=dtype)), randn(500, 65, dtype=dtype)
    heads = x.view(33, 2, 65)

    def results(part):
        mine = RowBatch(
            positions=rows.positions[part],
            visible_from=rows.visible_from[part],
            visible_to=rows.visible_to[part],
            write_rows=torch.arange(0),
            write_slots=torch.arange(0),
            groups=(
                RowGroup(
                    row_start=0,
                    num_requests=len(rows.positions[part]),
                    rows_per_request=1,
                    kv_slots=rows.groups[0].kv_slots[part],
                    kv_positions=torch.arange(100),
                ),
            ),
            max_visible=100,
        )
        plan = native.plan(
            native.select_topk(heads[part], weights[part, :2].contiguous(), keys, mine, 30, SOLO)
        )
        o, lse = torch.empty(plan.rows, 2, 50), torch.empty(plan.rows, 2)
        native.attend(plan, heads[part], StoredVectors.plain(kv), o, lse, sm_scale=0.1)
        return (
            linear(x[part]),
            experts(x[part], chosen[part], weights[part], torch.zeros_like(x[part])),
            native.head_product(heads[part], head_weight),
            o,
            lse,
        )

    for whole, *alone in zip(
        results(slice(None)), *(results(slice(i, i + 1)) for i in range(33)), strict=True
    ):
        assert torch.equal(whole, torch.cat(alone))


def test_what_is_not_finite_stays_so_and_in_its_row():
    native = NativeBackend(torch.float32)
    x = randn(8, 64)
    x[2, 5], x[5, 1] = torch.nan, torch.inf
    outs = [
        native.linear(Weight(randn(40, 64)))(x),
        native.rms_norm(x, torch.ones(64), 1e-6),
        native.swiglu(x),
        native.experts(Weight(randn(2, 20, 64)), Weight(randn(2, 64, 10)), first_expert=0, num_experts=2)(
            x, torch.tensor([[0, 1]] * 8), torch.ones(8, 2), torch.zeros(8, 64)
        ),
    ]
    for out in outs:
        assert out[2].isnan().any()
        assert not out[5].isfinite().all()
        assert out[[0, 1, 3, 4, 6, 7]].isfinite().all()
    huge = native.swiglu(torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 1.0]]))
    assert huge.tolist() == [[0.0, 200.0, 0.0]]


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
@pytest.mark.parametrize(("vocab_start", "count"), [(0, 6144), (5, 1001), (6147, 3), (1 << 18, 257)])
def test_compiled_noise_draws_the_same_tokens(monkeypatch, spread, vocab_start, count):
    NativeBackend(torch.float32)  # whose process has the compiled code
    scaled = randn(40, count) * spread
    scaled[1:, ::3] = -torch.inf
    scaled[2] = -torch.inf
    seed = torch.randint(-(1 << 62), 1 << 62, (40,), generator=GENERATOR)
    position = torch.arange(40) * 10**8
    assert loaded() is not None
    for purpose in (Purpose.COUPLED, Purpose.BONUS):
        compiled = gumbel_max_module.gumbel_max(scaled, vocab_start, seed, position, purpose)
        with monkeypatch.context() as patch:
            patch.setattr("kernels_integration.gumbel_max.loaded", lambda: None)
            scores, tokens = gumbel_max_module.gumbel_max(scaled, vocab_start, seed, position, purpose)
        assert torch.equal(compiled[1], tokens)
        torch.testing.assert_close(compiled[0].value, scores.value, rtol=1e-14, atol=1e-14)
        assert (compiled[0].rest.abs() <= 2**-52 * compiled[0].value.abs().nan_to_num(posinf=0.0)).all()


def test_noise_of_nan_and_of_rows_without_a_finite_logit():
    NativeBackend(torch.float32)
    seed, position = torch.tensor([1, 2]), torch.tensor([3, 4])
    scaled = randn(2, 4000)
    scaled[1, 3999] = torch.nan
    score, _ = gumbel_max_module.gumbel_max(scaled, 0, seed, position)
    assert score.value[0].isfinite()
    assert score.value[1].isnan()
    nothing = torch.full((2, 4000), -torch.inf)
    score, token = gumbel_max_module.gumbel_max(nothing, 7, seed, position)
    assert (score.value == -torch.inf).all()
    assert token.tolist() == [7, 7]
    huge = torch.full((2, 40), 2.0**50)  # swallows the noise in float64: what is left over decides
    _, token = gumbel_max_module.gumbel_max(huge, 0, seed, position)
    _, plain = gumbel_max_module.gumbel_max(torch.zeros(2, 40), 0, seed, position)
    assert token.tolist() == plain.tolist()


PROGRAM = """
from kernels_integration.native.build import BuildError
from kernels_integration.native.build import BuildError, library_path
from kernels_integration.native.library import library
try:
    library()
    print("built")
except BuildError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"PATH": "", "CC": ""}, "no C compiler is on the PATH; install gcc, or name one in CC"),
        ({"CC": "false"}, "false cannot build its kernels"),
        ({"XDG_CACHE_HOME": "/proc"}, "its kernels cannot be kept in /proc/latentray/native"),
    ],
)
def test_where_nothing_can_be_built_the_reason_is_told(environment, told, tmp_path):
    import os

    base = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)} | environment
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=base, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.slow
def test_kernels_that_others_may_have_put_there_are_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "latentray" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    library_path.cache_clear()
    try:
        with pytest.raises(BuildError, match="which other users may write to; make it yours alone"):
            library_path()
        folder.rmdir()
        assert library_path().exists()
        assert folder.stat().st_mode & 0o777 == 0o700
    finally:
        library_path.cache_clear()
