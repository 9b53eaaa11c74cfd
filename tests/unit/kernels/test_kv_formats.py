"""fp8_ds_mla and fp8 indexer keys: bytes, errors, extremes, and what reads them."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import (
    Fp8Format,
    PlainFormat,
    StoredVectors,
    VectorFormat,
    key_format,
    latent_format,
)
from kernels_integration.kv_layout import Fp8Layout, KVLayout
from kernels_integration.plan import build_plan
from kernels_integration.reference.attention import run, run_work_items
from kernels_integration.reference.selection import select_topk
from kernels_integration.rows import RowBatch, RowGroup

SMALLEST_NORMAL = 2.0**-126
FLT_MAX = torch.finfo(torch.float32).max


def kv_layout(rank: int = 512, rope: int = 64, index_dim: int = 128) -> KVLayout:
    return KVLayout(
        kv_cache_dtype="fp8_ds_mla",
        indexer_kv_dtype="fp8",
        latent_rank=rank,
        rope_dim=rope,
        index_dim=index_dim,
    )


LATENTS, KEYS = latent_format(kv_layout()), key_format(kv_layout())
formats = pytest.mark.parametrize("fmt", [LATENTS, KEYS], ids=["latents", "keys"])


def e4m3(byte: int) -> float:
    """By the definition of the OCP 8-bit floating point specification: bias 7, no infinities."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def bf16(two: bytes) -> float:
    return struct.unpack("<f", b"\0\0" + two)[0]


def nearest_e4m3(x: float) -> int:
    """The byte of the nearest value; of two equally near the even one."""
    is_negative = math.copysign(1, x) < 0
    numbers = [b for b in range(256) if b & 0x7F != 0x7F and (b >= 0x80) == is_negative]
    return min(numbers, key=lambda b: (abs(e4m3(b) - x), b & 1))


def float32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def read_by_the_document(row: bytes, num_fp8: int, num_bf16: int) -> list[float]:
    """A vector from its bytes by docs/kv-cache.md alone, in Python numbers."""
    scales_at = -(-num_fp8 // 4) * 4
    num_tiles = -(-num_fp8 // 128)
    scales = struct.unpack(f"<{num_tiles}f", row[scales_at : scales_at + 4 * num_tiles])
    tail_at = scales_at + 4 * num_tiles
    values = [e4m3(row[i]) * scales[i // 128] for i in range(num_fp8)]
    return values + [bf16(row[tail_at + 2 * i : tail_at + 2 * i + 2]) for i in range(num_bf16)]


def random(n: int, dim: int, seed: int = 0) -> Tensor:
    """Magnitudes that differ between vectors and within them, as activations' do."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return values * torch.rand(n, dim, generator=generator, dtype=torch.float64).mul(4).exp2()


@pytest.mark.parametrize(
    ("num_fp8", "num_bf16", "num_bytes"),
    [(512, 64, 656), (128, 32, 208), (128, 0, 144), (64, 0, 80), (130, 3, 160), (5, 1, 16), (256, 16, 304)],
)
def test_sizes(num_fp8: int, num_bf16: int, num_bytes: int) -> None:
    assert Fp8Layout(num_fp8=num_fp8, num_bf16=num_bf16).num_bytes == num_bytes


def test_every_byte_is_as_documented() -> None:
    """512 e4m3, 4 float32 scales, 64 bfloat16; each computed here number by number."""
    values = random(3, 576, seed=1)
    rows = LATENTS.encode(values)
    assert rows.shape == (3, 656)
    assert rows.dtype == torch.uint8
    for vector, row in zip(values.tolist(), rows, strict=True):
        single = [float32(x) for x in vector]
        scales = [float32(max(map(abs, single[t : t + 128])) / 448) for t in range(0, 512, 128)]
        stored = bytes(nearest_e4m3(float32(x / scales[i // 128])) for i, x in enumerate(single[:512]))
        rope = torch.tensor(single[512:]).bfloat16().view(torch.uint8).numpy().tobytes()
        assert row.numpy().tobytes() == stored + struct.pack("<4f", *scales) + rope


def test_every_byte_of_a_key_is_as_documented() -> None:
    """128 e4m3, then one float32 that is the power of two at or above max / 448."""
    values = random(4, 128, seed=2)
    values[3] = 0.0
    values[3, 5] = 448 * 2.0**-3  # a power of two already
    for vector, row in zip(values.tolist(), KEYS.encode(values), strict=True):
        single = [float32(x) for x in vector]
        scale = 2.0**-40
        while scale < float32(max(map(abs, single)) / 448):
            scale *= 2
        stored = bytes(nearest_e4m3(x / scale) for x in single)
        assert row.numpy().tobytes() == stored + struct.pack("<f", scale) + bytes(12)


@given(
    num_fp8=st.integers(1, 300),
    num_bf16=st.integers(0, 9),
    power_of_two=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_reads_what_the_document_says(num_fp8: int, num_bf16: int, power_of_two: bool, seed: int) -> None:
    """Any width, also where the last tile is short and the parts need padding."""
    fmt = Fp8Format(layout=Fp8Layout(num_fp8=num_fp8, num_bf16=num_bf16), power_of_two=power_of_two)
    rows = fmt.encode(random(2, fmt.dim, seed))
    exact = [read_by_the_document(row.numpy().tobytes(), num_fp8, num_bf16) for row in rows]
    assert fmt.decode(rows, torch.float64).tolist() == exact
    assert torch.equal(fmt.decode(rows, torch.float32), torch.tensor(exact, dtype=torch.float64).float())


def test_every_stored_value_is_read_exactly() -> None:
    """All 254 e4m3 numbers under one scale, both NaN codes left out: they occur under a NaN scale only."""
    codes = [b for b in range(256) if b & 0x7F != 0x7F]
    fmt = Fp8Format(layout=Fp8Layout(num_fp8=127))
    for half in (codes[:127], codes[127:]):
        row = torch.zeros(1, fmt.row_width, dtype=torch.uint8)
        row[0, :127] = torch.tensor(half, dtype=torch.uint8)
        row[0, 128:].view(torch.float32)[:] = 0.75
        for dtype in (torch.float32, torch.float64):
            assert fmt.decode(row, dtype)[0].tolist() == [e4m3(b) * 0.75 for b in half]


def tile_errors(fmt: VectorFormat, values: Tensor, num_fp8: int) -> Tensor:
    """|read - given| relative to the tile's largest magnitude, [n, num_fp8]."""
    read = fmt.decode(fmt.encode(values), torch.float64)
    tiles = values[:, :num_fp8].unflatten(1, (-1, 128))
    error = (read[:, :num_fp8].unflatten(1, (-1, 128)) - tiles).abs()
    return error / tiles.abs().amax(-1, keepdim=True)


def test_error_bounds_of_latents() -> None:
    """Half a step of the top binade, 16 of 448, plus float32 rounding; each value also within 1/16 of itself
    unless it is below 2^-6 of the scale, where half a step of 2^-9 counts."""
    values = random(400, 576)
    assert tile_errors(LATENTS, values, 512).max() <= 16 / 448 * (1 + 1e-6)
    tiles = values[:, :512].unflatten(1, (-1, 128))
    error = tile_errors(LATENTS, values, 512) * tiles.abs().amax(-1, keepdim=True)
    scale = tiles.abs().amax(-1, keepdim=True) / 448
    assert (error <= torch.maximum(tiles.abs() / 17, scale * 2.0**-10) * (1 + 1e-6)).all()
    rope = LATENTS.decode(LATENTS.encode(values), torch.float64)[:, 512:]
    assert torch.equal(rope, values[:, 512:].float().bfloat16().double())


def test_error_bounds_of_keys() -> None:
    """A power of two may double the scale: half a step is up to 16 of 256."""
    values = random(400, 128)
    assert tile_errors(KEYS, values, 128).max() <= 1 / 17 * (1 + 1e-6)
    just_above = torch.full((1, 128), 272.0, dtype=torch.float64)  # between 256 and 288, to the even 256
    assert tile_errors(KEYS, just_above, 128).max() == 16 / 272


@formats
def test_the_largest_of_a_tile_stays_nearly_exact(fmt: VectorFormat) -> None:
    """Plain scales put it on 448 itself; powers of two within its own half step."""
    values = random(200, fmt.dim)[:, : fmt.dim // 128 * 128]
    values = torch.nn.functional.pad(values, (0, fmt.dim - values.shape[1]))
    read = fmt.decode(fmt.encode(values), torch.float64)
    tile, read_tile = values[:, :128], read[:, :128]
    largest = tile.abs().argmax(-1, keepdim=True)
    tolerance = 2e-7 if fmt is LATENTS else 1 / 16
    torch.testing.assert_close(read_tile.gather(1, largest), tile.gather(1, largest), rtol=tolerance, atol=0)


@formats
def test_zeros(fmt: VectorFormat) -> None:
    zeros = torch.zeros(2, fmt.dim)
    rows = fmt.encode(zeros)
    assert torch.equal(fmt.decode(rows, torch.float32), zeros)
    never_written = torch.zeros_like(rows)
    assert torch.equal(fmt.decode(never_written, torch.float32), zeros)


@formats
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, SMALLEST_NORMAL, 1e-30, 1e-8])
def test_tiny_values_stay_within_half_a_step_of_the_least_scale(fmt: Fp8Format, magnitude: float) -> None:
    """Below the least scale a step is 2^-9 of it; nothing becomes NaN, infinite or of another sign."""
    values = torch.full((1, fmt.dim), magnitude, dtype=torch.float64)
    values[0, ::2] *= -1
    least = 2.0**-22 if fmt is KEYS else SMALLEST_NORMAL  # of 1e-4 / 448, to a power of two
    bf16_tail = fmt.layout.num_fp8
    read = fmt.decode(fmt.encode(values), torch.float64)
    error = (read - values).abs()[:, :bf16_tail]
    assert (error <= torch.maximum(values.abs()[:, :bf16_tail] / 16, torch.tensor(least * 2.0**-10))).all()
    assert (read * values >= 0).all()


@formats
def test_huge_values(fmt: Fp8Format) -> None:
    """Up to the largest float32; beyond it a value is infinite before it is stored."""
    huge = torch.full((1, fmt.dim), FLT_MAX, dtype=torch.float64)
    read = fmt.decode(fmt.encode(huge), torch.float64)[:, : fmt.layout.num_fp8]
    torch.testing.assert_close(read, huge[:, : fmt.layout.num_fp8], rtol=1 / 16, atol=0)
    assert fmt.decode(fmt.encode(huge * 2), torch.float64)[:, :128].isnan().all()


@formats
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e39])
def test_a_tile_with_a_fault_reads_as_nan_and_its_neighbours_do_not(fmt: Fp8Format, bad: float) -> None:
    values = random(2, fmt.dim)
    clean = fmt.decode(fmt.encode(values), torch.float32)
    values[0, 3] = bad
    read = fmt.decode(fmt.encode(values), torch.float32)
    assert read[0, :128].isnan().all()
    assert torch.equal(read[0, 128:], clean[0, 128:])
    assert torch.equal(read[1], clean[1])


@formats
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bytes_do_not_depend_on_the_batch(fmt: VectorFormat, dtype: torch.dtype) -> None:
    """One by one, in any order, as views, in any cut: the same bytes."""
    values = random(41, fmt.dim).to(dtype)
    together = fmt.encode(values)
    assert torch.equal(together, torch.cat([fmt.encode(values[i : i + 1]) for i in range(41)]))
    order = torch.randperm(41, generator=torch.Generator().manual_seed(1))
    assert torch.equal(together[order], fmt.encode(values[order]))
    wide = torch.full((41, fmt.dim + 7), float("nan"), dtype=dtype)
    wide[:, 3 : fmt.dim + 3] = values
    assert torch.equal(together, fmt.encode(wide[:, 3 : fmt.dim + 3]))
    assert torch.equal(together, fmt.encode(values.t().contiguous().t()))


def test_what_was_read_is_stored_again_as_the_same_values() -> None:
    """Under powers of two a tile keeps its scale; so under plain ones, whose largest value is 448 scales."""
    for fmt in (LATENTS, KEYS):
        read = fmt.decode(fmt.encode(random(50, fmt.dim)), torch.float64)
        again = fmt.decode(fmt.encode(read), torch.float64)
        torch.testing.assert_close(again, read, rtol=2e-7, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_plain_values_are_rounded_once(dtype: torch.dtype) -> None:
    values = random(3, 7)
    fmt = PlainFormat(7, dtype)
    assert torch.equal(fmt.decode(fmt.encode(values), torch.float64), values.to(dtype).double())


def test_a_gather_reads_only_its_slots() -> None:
    """The others hold NaN, and are not even decoded."""
    stored = StoredVectors.allocate(9, LATENTS)
    values = random(9, 576).float()
    values[5:] = float("nan")
    stored.write(torch.arange(9), values)
    for index_dtype in (torch.int32, torch.int64):
        slots = torch.tensor([4, 0, 4], dtype=index_dtype)
        expected = LATENTS.decode(LATENTS.encode(values[[4, 0, 4]]), torch.float32)
        assert torch.equal(stored.gather(slots, torch.float32), expected)


@pytest.mark.parametrize("attend", [run, run_work_items], ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_lens", [[12] * 5, [5, 0, 400, 1]], ids=["uniform", "ragged"])
def test_attention_equals_attention_over_the_decoded_cache(attend, dtype, kv_lens) -> None:
    """Bit for bit: the format changes what is read, and nothing else."""
    stored = StoredVectors.allocate(500, LATENTS)
    stored.write(torch.arange(500), random(500, 576, seed=3))
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    decoded = StoredVectors.plain(LATENTS.decode(stored.storage, exact))
    slots = torch.cat([torch.randperm(500, generator=torch.Generator().manual_seed(4))[:n] for n in kv_lens])
    plan = build_plan(kv_lens, 3, kv_indices=slots)
    q = random(len(kv_lens) * 8, 576, seed=5).view(-1, 8, 576).mul(0.1).to(dtype)
    results = []
    for kv in (stored, decoded):
        o = torch.empty(*q.shape[:2], 512, dtype=dtype)
        lse = torch.empty(q.shape[:2], dtype=exact)
        attend(plan, q, kv, o, lse, sm_scale=0.05)
        results.append((o, lse))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_selection_equals_selection_over_the_decoded_keys(dtype: torch.dtype) -> None:
    stored = StoredVectors.allocate(300, KEYS)
    stored.write(torch.arange(300), random(300, 128, seed=6))
    decoded = StoredVectors.plain(KEYS.decode(stored.storage, dtype))
    positions = torch.arange(280, 290)
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(7))[:290]
    rows = RowBatch(
        positions=positions,
        visible_from=torch.zeros_like(positions),
        visible_to=positions + 1,
        write_rows=positions[:0],
        write_slots=positions[:0],
        groups=(
            RowGroup(
                row_start=0,
                num_requests=1,
                rows_per_request=10,
                kv_slots=slots.unsqueeze(0),
                kv_positions=torch.arange(290),
            ),
        ),
        max_visible=290,
    )
    q, weights = random(40, 128, seed=8).view(10, 4, 128).to(dtype), random(10, 4, seed=9).to(dtype)
    dcp = DcpGroup(1, SoloCollectives())
    found = [select_topk(q, weights, keys, rows, 64, dcp).kv_indices for keys in (stored, decoded)]
    assert torch.equal(*found)
    exact = select_topk(q, weights, StoredVectors.plain(random(300, 128, seed=6)), rows, 64, dcp).kv_indices
    assert not torch.equal(found[0], exact), "the keys were stored without loss: the test tells nothing apart"
