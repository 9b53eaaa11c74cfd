"""Norms, rope and cache writes in Triton: against float64, and bytes of fp8 rows against the format's own."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from actors.model.rotary import rotary_frequencies
from kernels_integration.kv_formats import (
    Fp8Format,
    PlainFormat,
    StoredVectors,
    VectorFormat,
    key_format,
    latent_format,
)
from kernels_integration.kv_layout import KVLayout
from kernels_integration.reference import layers
from kernels_integration.triton import cache_write, norms
from tests.support.guarded import Guarded, largest_row_error

gpu = pytest.mark.gpu
EPS = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
SIZES = [pytest.param(128, 32), pytest.param(512, 64, marks=gpu), pytest.param(256, 64)]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rope_table(rows: int, rotary: int, dtype: torch.dtype = torch.float32) -> Tensor:
    positions = torch.randint(0, 5000, (rows,), generator=torch.Generator().manual_seed(9))
    return layers.rotary_table(positions, rotary_frequencies(10000.0, rotary, dtype))


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return weight.double() * x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """[T, R] or [T, H, R] in float64."""
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    table = table.to(torch.complex128).view(table.shape[0], *[1] * (x.dim() - 2), -1)
    return torch.view_as_real(pairs * table).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 96, 512, 1536, pytest.param(7168, marks=gpu)])
def test_rms_norm(device, width, dtype):
    x, weight = random(5, width, dtype=dtype), random(width, seed=1, dtype=dtype)
    out = Guarded((5, width), dtype, device)
    norms.rms_norm(Guarded.of(x, device).tensor, Guarded.of(weight, device).tensor, EPS, out.tensor)
    out.check()
    assert largest_row_error(out.tensor, rms_norm(x, weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(device, dtype):
    x, residual = random(4, 200, dtype=dtype), random(4, 200, seed=1, dtype=dtype)
    weight = random(200, seed=2)
    kept, out = Guarded.of(residual, device), Guarded((4, 200), dtype, device)
    norms.add_rms_norm(Guarded.of(x, device).tensor, kept.tensor, weight.to(device), EPS, out.tensor)
    kept.check()
    out.check()
    total = (x.float() + residual.float()).to(dtype)
    assert torch.equal(kept.tensor.cpu(), total)
    assert largest_row_error(out.tensor, rms_norm(total, weight)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary", [8, 20, 64])
def test_rotate_pairs(device, rotary, dtype):
    """A slice of wider rows, in place and into another tensor."""
    x, table = random(3, 5, 7 + rotary, dtype=dtype), rope_table(3, rotary)
    expected = rotated(x[..., 7:], table)
    wide = Guarded.of(x, device)
    out = Guarded((3, 5, rotary), dtype, device)
    norms.rotate_pairs(wide.tensor[..., 7:], table.to(device), out.tensor)
    norms.rotate_pairs(wide.tensor[..., 7:], table.to(device), wide.tensor[..., 7:])
    wide.check()
    out.check()
    assert largest_row_error(out.tensor, expected) < TOLERANCE[dtype]
    assert largest_row_error(wide.tensor[..., 7:], expected) < TOLERANCE[dtype]
    assert torch.equal(wide.tensor[..., :7].cpu(), x[..., :7])


def layout(latent: int, rope: int, dim: int, kind: str) -> KVLayout:
    return KVLayout(
        kv_cache_dtype="fp8_ds_mla" if kind == "fp8" else kind,
        indexer_kv_dtype=kind,
        latent_rank=latent,
        rope_dim=rope,
        index_dim=dim,
    )


# The interpreter drops the carry when rounding to fp8 reaches the next power of two.
KINDS = ["float32", "bfloat16", pytest.param("fp8", marks=gpu)]
SLOTS = torch.tensor([7, -1, 0, 12, -1, 3])


def empty_cache(format_: VectorFormat, device: torch.device) -> tuple[StoredVectors, Guarded]:
    guarded = Guarded((13, format_.row_width), format_.row_dtype, device)
    return StoredVectors(guarded.tensor, format_), guarded


def assert_only_written(guarded: Guarded) -> None:
    guarded.check()
    others = [slot for slot in range(13) if slot not in SLOTS.tolist()]
    assert guarded.is_poison(guarded.tensor[others]).all(), "a slot that no row has was written"


def error_allowed(format_: VectorFormat) -> float:
    if isinstance(format_, PlainFormat):
        return TOLERANCE[format_.row_dtype]
    return 0.04  # e4m3 keeps 3 bits of mantissa


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("latent", "rope"), SIZES)
def test_latents_normed_and_rotated(device, latent, rope, kind):
    x = random(6, latent + rope)
    weight, table = random(latent, seed=1), rope_table(6, rope)
    cache, guarded = empty_cache(latent_format(layout(latent, rope, 0, kind)), device)
    cache_write.write_latents(
        Guarded.of(x, device).tensor, weight.to(device), EPS, table.to(device), SLOTS.to(device), cache
    )
    assert_only_written(guarded)
    expected = torch.cat((rms_norm(x[:, :latent], weight), rotated(x[:, latent:], table)), 1)
    stored = SLOTS[SLOTS >= 0]
    values = StoredVectors(guarded.tensor.cpu(), cache.format).gather(stored, torch.float64)
    assert largest_row_error(values, expected[SLOTS >= 0]) < error_allowed(cache.format)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "rotary"), [(64, 32), (128, 64), (40, 8)])
def test_index_keys_normed_and_rotated(device, dim, rotary, kind):
    x = random(6, dim) + 3.0
    weight, bias, table = random(dim, seed=1), random(dim, seed=2), rope_table(6, rotary)
    cache, guarded = empty_cache(key_format(layout(128, 8, dim, kind)), device)
    cache_write.write_index_keys(
        Guarded.of(x, device).tensor,
        weight.to(device),
        bias.to(device),
        EPS,
        table.to(device),
        SLOTS.to(device),
        cache,
    )
    assert_only_written(guarded)
    expected = torch.nn.functional.layer_norm(x.double(), (dim,), weight.double(), bias.double(), EPS)
    expected[:, :rotary] = rotated(expected[:, :rotary], table)
    values = StoredVectors(guarded.tensor.cpu(), cache.format).gather(SLOTS[SLOTS >= 0], torch.float64)
    assert largest_row_error(values, expected[SLOTS >= 0]) < error_allowed(cache.format)


def awkward_values(width: int) -> Tensor:
    """Rows of every size, halves between two e4m3 values, tiles of zeros, NaN and infinities."""
    x = random(40, width, seed=5) * torch.logspace(-12, 12, 40).unsqueeze(1)
    x[3], x[4, :64], x[5, 7], x[6, 1], x[7, 2] = 0.0, 0.0, torch.nan, torch.inf, -torch.inf
    x[8] = torch.arange(width) % 97 / 16.0
    x[9] = 1e-42
    return x


@gpu
@pytest.mark.parametrize(("which", "width"), [("latent", 160), ("latent", 576), ("key", 128), ("key", 64)])
def test_fp8_bytes_are_those_of_the_format(device, which, width):
    """Without norm and rope the kernel only encodes: bit for bit, also what a NaN of a tile becomes."""
    x = awkward_values(width)
    rope = {160: 32, 576: 64}.get(width, 0)
    sizes = layout(width - rope, rope, width, "fp8")
    format_ = latent_format(sizes) if which == "latent" else key_format(sizes)
    storage = Guarded((40, format_.row_width), torch.uint8, device)
    cache = StoredVectors(storage.tensor, format_)
    slots = torch.arange(40, device=device)
    if which == "latent":
        cache_write.write_latents(Guarded.of(x, device).tensor, None, EPS, None, slots, cache)
    else:
        cache_write.write_index_keys(Guarded.of(x, device).tensor, None, None, EPS, None, slots, cache)
    storage.check()
    expected = format_.encode(x)
    ordinary = x.isfinite().all(dim=1)
    assert isinstance(format_, Fp8Format)
    used = format_.layout.bf16_start + 2 * format_.layout.num_bf16
    written = storage.tensor.cpu()
    assert torch.equal(written[ordinary, :used], expected[ordinary, :used])
    assert storage.is_poison(written[:, used:]).all(), "what lies behind a vector stays as allocated: zero"
    actual = StoredVectors(storage.tensor.cpu(), format_).gather(torch.arange(40), torch.float32)
    wanted = format_.decode(expected, torch.float32)
    assert torch.equal(actual.isnan(), wanted.isnan())
