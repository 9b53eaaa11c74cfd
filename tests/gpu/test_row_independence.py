"""What `--deterministic` computes by: a row has the same bits whatever rows are beside it, and right ones."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from kernels_integration.plan import build_plan
from kernels_integration.triton import experts as grouped
from kernels_integration.triton import indexer, mla_attention, products
from kernels_integration.triton.attention_items import FixedSplits, even_splits
from kernels_integration.triton.exact_product import exact_product
from tests.gpu.test_indexer_kernel import IndexerCase
from tests.gpu.test_mla_attention_kernel import AttentionCase
from tests.support.guarded import Guarded, largest_row_error

gpu = pytest.mark.gpu
NUM_ROWS = [1, 2, 7, 16, 17, 33, 64, 65, 128, 130, 256, 257, 1000]
"""On both sides of every change of tiles."""
SHAPES = [(2240, 2048), (3072, 1536), (8192, 1536), (2048, 2816), (5632, 2048), (200, 640), (30, 48)]


def drawn(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return Guarded.of(torch.randn(shape, generator=generator).to(dtype), device).tensor


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 70, 600), (20, 130, 96), (70, 64, 300)])
def test_products(device, rows, outputs, width, dtype):
    x, weight = (
        drawn(rows, width, device=device, dtype=dtype),
        drawn(outputs, width, device=device, dtype=dtype),
    )
    product = products.FixedProduct(weight)
    for _ in range(2):  # the counters are as they were
        error = largest_row_error(product(x), x.double() @ weight.double().T)
        assert error < (1e-5 if dtype == torch.float32 else 8e-3)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=gpu)], ids=str)
def test_head_products_of_strided_rows(device, dtype):
    x = drawn(19, 3, 80, device=device, dtype=dtype)[..., :64]
    weight = drawn(3, 64, 70, device=device, dtype=dtype)
    out = Guarded((19, 3, 90), dtype, device)
    products.head_product(x, weight, out.tensor[..., :70])
    out.check()
    expected = torch.einsum("thi,hio->tho", x.double(), weight.double())
    assert largest_row_error(out.tensor[..., :70], expected) < (1e-5 if dtype == torch.float32 else 8e-3)
    assert out.tensor[..., 70:].isnan().all()


@gpu
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
def test_bits_of_products(device, outputs, width):
    x, weight = drawn(max(NUM_ROWS), width, device=device), drawn(outputs, width, device=device, seed=1)
    product = products.FixedProduct(weight)
    expected = product(x)
    assert largest_row_error(expected, x.double() @ weight.double().T) < 8e-3
    for rows in NUM_ROWS:
        assert torch.equal(product(x[:rows]), expected[:rows]), rows
        assert torch.equal(product(x[-rows:]), expected[-rows:]), rows


@gpu
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 512), (512, 128)])
def test_bits_of_head_products(device, inputs, outputs):
    x, weight = drawn(max(NUM_ROWS), 16, inputs, device=device), drawn(16, inputs, outputs, device=device)
    expected = torch.empty(max(NUM_ROWS), 16, outputs, dtype=torch.bfloat16, device=device)
    products.head_product(x, weight, expected)
    for rows in NUM_ROWS:
        out = torch.empty_like(expected[:rows])
        products.head_product(x[-rows:], weight, out)
        assert torch.equal(out, expected[-rows:]), rows


@gpu
@pytest.mark.parametrize("outputs", [64, 30])
def test_bits_of_exact_products(device, outputs):
    x = drawn(max(NUM_ROWS), 2048, device=device)
    weight = drawn(outputs, 2048, device=device, dtype=torch.float32)
    expected = exact_product(x, weight)
    for rows in NUM_ROWS:
        assert torch.equal(exact_product(x[-rows:], weight), expected[-rows:]), rows


@gpu
def test_bits_of_experts(device):
    """Tiles of 16, 32 and 64 rows."""
    rows, num_experts, hidden, width = 300, 8, 2048, 1408
    x = drawn(rows, hidden, device=device)
    gate_up = drawn(num_experts, 2 * width, hidden, device=device) * hidden**-0.5
    down = drawn(num_experts, hidden, width, device=device) * width**-0.5
    generator = torch.Generator().manual_seed(0)
    experts = torch.stack([torch.randperm(num_experts, generator=generator)[:6] for _ in range(rows)])
    experts, weights = experts.int().to(device), drawn(rows, 6, device=device, dtype=torch.float32)

    def outputs(own: slice, tile: int) -> Tensor:
        out = torch.zeros_like(x[own])
        tiles = grouped.group_pairs(experts[own].contiguous(), num_experts, rows=tile)
        grouped.run_experts(x[own], gate_up, down, tiles, weights[own].contiguous(), out, weight_first=True)
        return out

    expected = outputs(slice(None), 64)
    for tile in (16, 32, 64):
        assert torch.equal(outputs(slice(None), tile), expected), tile
        assert torch.equal(outputs(slice(7, 8), tile), expected[7:8]), tile
    usual = torch.zeros_like(x)
    grouped.run_experts(x, gate_up, down, grouped.group_pairs(experts, num_experts), weights, usual)
    assert largest_row_error(expected, usual) < 8e-3


@pytest.mark.parametrize("kv_dtype", [None, "fp8_ds_mla"])
def test_attention_in_fixed_splits(device, kv_dtype):
    lengths = [0, 1, 255, 256, 257, 700]
    case = AttentionCase(device, lengths, 5, heads=4, latent=128, rope=32, kv_dtype=kv_dtype)
    case.check(fixed=FixedSplits(most_tokens=max(lengths)))


@pytest.mark.parametrize(
    ("item_bytes", "tokens"),
    [
        (
            2,
            {1: None, 4: None, 8: 128, 16: 256, 32: 256, 48: None, 64: 512, 128: 1024, 256: 2048, 8192: 2048},
        ),
        (1, {1: None, 4: None, 8: 64, 16: 128, 32: 256, 48: None, 64: 512, 128: 1024, 256: 2048}),
    ],
)
def test_even_splits_fill_the_device_once(item_bytes, tokens):
    found = {rows: even_splits(rows, 2048, 132, item_bytes) for rows in tokens}
    assert {rows: split and split.tokens for rows, split in found.items()} == tokens


@pytest.mark.parametrize("item_bytes", [1, 2])
@pytest.mark.parametrize("rows", [4, pytest.param(16, marks=gpu), pytest.param(64, marks=gpu)])
def test_attention_in_even_splits(device, rows, item_bytes):
    """Of rows shorter than the others too."""
    lengths = [300, 0, 7, *[600] * (rows - 3)]
    fixed = even_splits(rows, 600, 2 * rows, item_bytes)
    kv_dtype = "fp8_ds_mla" if item_bytes == 1 else None
    case = AttentionCase(device, lengths, 5, heads=4, latent=128, rope=32, kv_dtype=kv_dtype)
    assert fixed is not None
    case.check(fixed=fixed)


@gpu
@pytest.mark.parametrize("kv_dtype", [None, "fp8_ds_mla"])
def test_bits_of_attention(device, kv_dtype):
    lengths = [2048, 1, 300, 0, 40_000, 256, 2047, 9000, *[2048] * 60]
    case = AttentionCase(
        device, lengths, 132, heads=16, dtype=torch.bfloat16, kv_dtype=kv_dtype, spare_rows=0
    )
    case.check(fixed=FixedSplits(most_tokens=max(lengths)))
    together, together_lse = case.o.tensor.clone(), case.lse.tensor.clone()
    starts = case.plan.kv_indptr.tolist()
    for row in (0, 1, 2, 3, 4, 5, 7, 60):
        indices = case.kv_indices[starts[row] : starts[row + 1]].to(device)
        # With room for more than the row has, as in a bucket.
        room = torch.cat((indices, torch.zeros(5000, dtype=indices.dtype, device=device)))
        plan = build_plan(torch.tensor([lengths[row]], device=device), None, kv_indices=room)
        o, lse = torch.empty_like(together[:1]), torch.empty_like(together_lse[:1])
        mla_attention.run(
            plan,
            case.q.tensor[row : row + 1],
            case.kv,
            o,
            lse,
            sm_scale=case.scale,
            fixed=FixedSplits(most_tokens=lengths[row] + 5000),
        )
        assert torch.equal(o[0], together[row]), row
        assert torch.equal(lse[0], together_lse[row]), row


def scores_of(case: IndexerCase, shared: int) -> Tensor:
    rows = case.rows.part(0, case.T)
    scores = torch.full_like(case.scores.tensor, torch.nan)
    object.__setattr__(rows, "rows_per_request", shared)
    indexer.score_tokens(case.q, case.weights, case.keys, rows, scores, is_fixed=True)
    return scores.nan_to_num(nan=-1e30)


@pytest.mark.parametrize("key_dtype", [None, pytest.param("fp8", marks=gpu)])
def test_fixed_scores(device, key_dtype):
    """As `score_tokens` has them otherwise, and the same alone and beside rows of the same request."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    heads, dim = (4, 64) if device.type == "cpu" else (64, 128)
    longest = 70 if device.type == "cpu" else 3000
    bounds = [(0, longest - 8 + i) for _ in range(3) for i in range(8)]
    case = IndexerCase(
        device,
        bounds,
        rows_per_request=8,
        shares=True,
        heads=heads,
        dim=dim,
        dtype=dtype,
        key_dtype=key_dtype,
    )
    case.check_scores()
    usual = case.scores.tensor.nan_to_num(nan=-1e30)
    alone = scores_of(case, 1)
    torch.testing.assert_close(alone, usual, rtol=2e-2, atol=2e-2 * float(usual[usual > -1e29].abs().max()))
    for shared in (2, 4, 8):
        assert torch.equal(scores_of(case, shared), alone), shared
