"""From projections to the paged cache in one kernel: norm, rope, quantise, store.

T rows, C latent rank, R rotary dims, D indexer dims. A row with slot -1 is not stored. Slots of rows that are
stored differ. fp8 bytes are those of `kv_formats.Fp8Format`, which says what they mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.kv_formats import E4M3_MAX, SMALLEST_NORMAL, StoredVectors
from kernels_integration.kv_layout import FP8_TILE
from kernels_integration.triton.tiles import fp8_format


def write_latents(
    latents: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    table: Tensor | None,
    slots: Tensor,
    cache: StoredVectors,
) -> None:
    """Stores [norm(c) | rotated rope] of latents [T, C + R] in slots [T] of the cache, in its format.

    norm_weight [C]; None: c as it is. table [T, R/2] complex64 as for `rotate_pairs`; None: not rotated.
    latents in any floating dtype, last dim contiguous, not written; all arithmetic in float32.
    C of an fp8 cache is a multiple of 128.
    """
    T, width = latents.shape
    if T == 0:
        return
    C = _num_normed(cache, width, norm_weight, table)
    table = _real(table)
    storage = cache.storage
    fp8 = fp8_format(cache)
    if fp8 is not None:
        C = fp8.layout.num_fp8
    R = width - C
    _write_latents[(T,)](
        latents,
        latents if norm_weight is None else norm_weight,
        latents if table is None else table,
        slots,
        storage,
        storage.view(torch.float32) if fp8 is not None else storage,
        storage.view(torch.bfloat16) if fp8 is not None else storage,
        eps,
        storage.shape[0],
        latents.stride(0),
        0 if table is None else table.stride(0),
        storage.stride(0),
        HAS_NORM=norm_weight is not None,
        HAS_ROPE=table is not None,
        IS_FP8=fp8 is not None,
        SCALES_AT=fp8.layout.scales_start // 4 if fp8 is not None else 0,
        ROPE_AT=fp8.layout.bf16_start // 2 if fp8 is not None else C,
        SMALLEST_MAX=fp8.smallest_max if fp8 is not None else 0.0,
        POWER_OF_TWO=fp8 is not None and fp8.power_of_two,
        SMALLEST_SCALE=SMALLEST_NORMAL,
        LARGEST=E4M3_MAX,
        C=C,
        PAIRS=R // 2,
        BLOCK_C=triton.next_power_of_2(C),
        BLOCK_P=triton.next_power_of_2(max(R // 2, 1)),
        TILE=min(FP8_TILE, triton.next_power_of_2(C)),
        num_warps=4,
    )


def write_index_keys(
    keys: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    table: Tensor | None,
    slots: Tensor,
    cache: StoredVectors,
) -> None:
    """Stores indexer keys [T, D]: LayerNorm, the first R dims rotated, in the cache's format.

    Arguments as for `write_latents`; norm_weight and norm_bias [D], both or none. fp8: D at most 128.
    """
    T, D = keys.shape
    if T == 0:
        return
    table = _real(table)
    storage = cache.storage
    fp8 = fp8_format(cache)
    _write_keys[(T,)](
        keys,
        keys if norm_weight is None else norm_weight,
        keys if norm_bias is None else norm_bias,
        keys if table is None else table,
        slots,
        storage,
        storage.view(torch.float32) if fp8 is not None else storage,
        eps,
        storage.shape[0],
        keys.stride(0),
        0 if table is None else table.stride(0),
        storage.stride(0),
        HAS_NORM=norm_weight is not None,
        IS_FP8=fp8 is not None,
        SCALES_AT=fp8.layout.scales_start // 4 if fp8 is not None else 0,
        SMALLEST_MAX=fp8.smallest_max if fp8 is not None else 0.0,
        POWER_OF_TWO=fp8 is not None and fp8.power_of_two,
        SMALLEST_SCALE=SMALLEST_NORMAL,
        LARGEST=E4M3_MAX,
        D=D,
        ROTARY=0 if table is None else 2 * table.shape[1],
        BLOCK_D=triton.next_power_of_2(D),
        num_warps=1,
    )


def _real(table: Tensor | None) -> Tensor | None:
    return torch.view_as_real(table) if table is not None and table.is_complex() else table


def _num_normed(cache: StoredVectors, width: int, norm_weight: Tensor | None, table: Tensor | None) -> int:
    if norm_weight is not None:
        return norm_weight.shape[0]
    return width if table is None else width - 2 * table.shape[1]


@triton.jit
def _tile_scale(
    largest,
    SMALLEST_MAX: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """The scale of a tile by its largest magnitude; NaN where that is NaN or infinite."""
    is_finite = largest < float("inf")
    scale = tl.math.div_rn(tl.maximum(largest, SMALLEST_MAX), tl.zeros_like(largest) + LARGEST)
    scale = tl.maximum(scale, SMALLEST_SCALE)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(is_finite, scale, float("nan"))


@triton.jit
def _largest(values, axis: tl.constexpr):
    """Of magnitudes; infinity where a value is NaN or infinite, whatever `max` makes of NaN."""
    magnitude = tl.abs(values)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), axis)


@triton.jit
def _write_latents(
    latents,
    norm_weight,
    table,
    slots,
    cache,
    cache_scales,
    cache_rope,
    eps,
    num_slots,
    stride_latent,
    stride_table,
    stride_cache,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    IS_FP8: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROPE_AT: tl.constexpr,
    SMALLEST_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
    C: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    # [tiles, TILE]: the norm is over all of it, an fp8 scale over a row of it.
    column = tl.arange(0, BLOCK_C // TILE)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    in_c = column < C
    value = tl.load(latents + row * stride_latent + column, mask=in_c, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / C + eps)
        value = tl.load(norm_weight + column, mask=in_c, other=0.0).to(tl.float32) * (value * scale)
    if IS_FP8:
        tile = tl.arange(0, BLOCK_C // TILE)
        scales = _tile_scale(_largest(value, 1), SMALLEST_MAX, SMALLEST_SCALE, LARGEST, POWER_OF_TWO)
        scale_at = cache_scales + slot * (stride_cache // 4) + SCALES_AT + tile
        tl.store(scale_at, scales, mask=tile * TILE < C)
        value = tl.math.div_rn(value, tl.broadcast_to(scales[:, None], value.shape))
        stored = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        tl.store(cache + slot * stride_cache + column, stored, mask=in_c)
        rope_at = cache_rope + slot * (stride_cache // 2) + ROPE_AT
    else:
        tl.store(cache + slot * stride_cache + column, value.to(cache.dtype.element_ty), mask=in_c)
        rope_at = cache_rope + slot * stride_cache + ROPE_AT
    if PAIRS > 0:
        pair = tl.arange(0, BLOCK_P)
        is_pair = pair < PAIRS
        even_at = latents + row * stride_latent + C + 2 * pair
        even = tl.load(even_at, mask=is_pair, other=0.0).to(tl.float32)
        odd = tl.load(even_at + 1, mask=is_pair, other=0.0).to(tl.float32)
        if HAS_ROPE:
            cos = tl.load(table + row * stride_table + 2 * pair, mask=is_pair, other=0.0)
            sin = tl.load(table + row * stride_table + 2 * pair + 1, mask=is_pair, other=0.0)
            even, odd = even * cos - odd * sin, even * sin + odd * cos
        dtype = cache_rope.dtype.element_ty
        tl.store(rope_at + 2 * pair, even.to(dtype), mask=is_pair)
        tl.store(rope_at + 2 * pair + 1, odd.to(dtype), mask=is_pair)


@triton.jit
def _write_keys(
    keys,
    norm_weight,
    norm_bias,
    table,
    slots,
    cache,
    cache_scales,
    eps,
    num_slots,
    stride_key,
    stride_table,
    stride_cache,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SMALLEST_MAX: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    LARGEST: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    # Pairs apart, so that both halves of a rotation are at hand.
    even = 2 * tl.arange(0, BLOCK_D // 2)
    odd = even + 1
    is_even, is_odd = even < D, odd < D
    key = keys + row * stride_key
    x_even = tl.load(key + even, mask=is_even, other=0.0).to(tl.float32)
    x_odd = tl.load(key + odd, mask=is_odd, other=0.0).to(tl.float32)
    if HAS_NORM:
        mean = (tl.sum(x_even, 0) + tl.sum(x_odd, 0)) / D
        x_even = tl.where(is_even, x_even - mean, 0.0)
        x_odd = tl.where(is_odd, x_odd - mean, 0.0)
        scale = tl.rsqrt((tl.sum(x_even * x_even, 0) + tl.sum(x_odd * x_odd, 0)) / D + eps)
        x_even = x_even * scale * tl.load(norm_weight + even, mask=is_even, other=0.0).to(tl.float32)
        x_odd = x_odd * scale * tl.load(norm_weight + odd, mask=is_odd, other=0.0).to(tl.float32)
        x_even += tl.load(norm_bias + even, mask=is_even, other=0.0).to(tl.float32)
        x_odd += tl.load(norm_bias + odd, mask=is_odd, other=0.0).to(tl.float32)
    if ROTARY > 0:
        turns = even < ROTARY
        cos = tl.load(table + row * stride_table + even, mask=turns, other=1.0)
        sin = tl.load(table + row * stride_table + odd, mask=turns, other=0.0)
        x_even, x_odd = x_even * cos - x_odd * sin, x_even * sin + x_odd * cos
    cache_at = cache + slot * stride_cache
    if IS_FP8:
        largest = tl.maximum(_largest(x_even, 0), _largest(x_odd, 0))
        scale = _tile_scale(largest, SMALLEST_MAX, SMALLEST_SCALE, LARGEST, POWER_OF_TWO)
        tl.store(cache_scales + slot * (stride_cache // 4) + SCALES_AT, scale)
        x_even = tl.math.div_rn(x_even, tl.zeros_like(x_even) + scale)
        x_odd = tl.math.div_rn(x_odd, tl.zeros_like(x_odd) + scale)
        tl.store(cache_at + even, x_even.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=is_even)
        tl.store(cache_at + odd, x_odd.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=is_odd)
    else:
        dtype = cache.dtype.element_ty
        tl.store(cache_at + even, x_even.to(dtype), mask=is_even)
        tl.store(cache_at + odd, x_odd.to(dtype), mask=is_odd)
