"""Sparse MLA attention by the plan's work items, and the merge of split rows.

One latent vector of a token is key (all C + R entries) and value (the first C). Shape legend: T rows,
H heads, C latent rank, R rope part, N KV tokens of a tile.

The slots of a tile are loaded one tile ahead of its vectors, so that the loop's software pipeline can start
the gather early. fp8 vectors keep their scale per 128 values: the scales multiply scores and
probabilities, which are few, instead of the vectors.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import Fp8Format, PlainFormat, StoredVectors
from kernels_integration.kv_layout import FP8_TILE
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.plan_check import check_fit
from kernels_integration.triton.tiles import dot_precision, dot_size, fp8_format

_LOG2_E = 1.4426950408889634
_ROWS_PER_PART = 4
FP8_LATENTS = (FP8_TILE, 2 * FP8_TILE, 4 * FP8_TILE)
"""Latent ranks that are read in fp8."""


def runs_rows_alone(rows: int, num_parts: int) -> bool:
    """Whether every row is a program of its own: of many rows for each worker splitting brings nothing."""
    return num_parts == 1 or rows >= _ROWS_PER_PART * num_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTiles:
    """How the kernel is cut; which is fastest depends on heads, types and device, the result does not."""

    heads: int
    tokens: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, rows: int, num_heads: int, q_dtype: torch.dtype, kv_item_bytes: int) -> "AttentionTiles":
        """As measured fastest on an H200 among some ten for each case."""
        if q_dtype == torch.float32:
            return cls(heads=16, tokens=16, num_warps=4, num_stages=1)
        if num_heads > 16:
            heads = 64 if num_heads > 32 else 32
            return cls(heads=heads, tokens=32 if kv_item_bytes == 1 else 64, num_warps=8, num_stages=2)
        if kv_item_bytes > 1:
            return cls(heads=16, tokens=64, num_warps=8, num_stages=3)
        if rows < 8:  # cut into items of a tile or two, of which a large one would stay half empty
            return cls(heads=16, tokens=32, num_warps=4, num_stages=3)
        return cls(heads=16, tokens=128, num_warps=8, num_stages=2)


def run(
    plan: SparseMLAPlan,
    q: Tensor,
    kv: StoredVectors,
    o: Tensor,
    lse: Tensor,
    *,
    sm_scale: float,
    tiles: AttentionTiles | None = None,
) -> None:
    """`attention.run` on a GPU: row t attends to its planned slots of kv. Writes o and lse in place.

    q [>= T, H, C + R] bfloat16, float16 or float32, last dim contiguous; products are in q's dtype, sums in
    float32. kv of the same width: plain, or fp8 with whole tiles of 128 values. o [as q, H, C] in any
    floating dtype, lse [as q, H] float32. A slot below 0 counts as absent; a row without KV gets o = 0,
    lse = -inf. Rows from T = plan.rows on are neither read nor written. The order of summation depends on
    the plan alone.

    Errors: PlanError, before anything is written, when the plan does not fit the tensors or the types are
    not among these.
    """
    kv_indices = check_fit(plan, q, kv, o, lse)
    _require_types(q, kv)
    split = plan.split
    if plan.rows == 0:
        return
    H, C = o.shape[1], o.shape[2]
    R = kv.dim - C
    storage = kv.storage
    fp8 = fp8_format(kv)
    tiles = tiles or AttentionTiles.choose(plan.rows, H, q.dtype, storage.element_size())
    rows_alone = split is None or runs_rows_alone(plan.rows, split.num_parts)
    if rows_alone:
        # Nothing of these is read.
        work_indptr, work_info, num_programs, partial_rows = plan.kv_indptr, plan.kv_indptr, plan.rows, 0
    else:
        assert split is not None
        work_indptr, work_info = split.work_indptr, split.work_info
        num_programs, partial_rows = split.num_parts, split.num_partial_rows
    partial_o = torch.empty(max(partial_rows, 1), H, C, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(max(partial_rows, 1), H, dtype=torch.float32, device=q.device)
    head_tiles = triton.cdiv(H, tiles.heads)
    # Neighbouring programs share a part's KV: the second finds it in the L2 cache.
    grid = (head_tiles * num_programs,)
    common = {
        "q": q,
        "kv_indices": kv_indices,
        "kv_indptr": plan.kv_indptr,
        "work_indptr": work_indptr,
        "work_info": work_info,
        "o": o,
        "lse": lse,
        "partial_o": partial_o,
        "partial_lse": partial_lse,
        "max_items": work_info.shape[0],
        "num_indices": kv_indices.shape[0],
        "num_heads": H,
        "score_scale": sm_scale * _LOG2_E,
        "stride_q_row": q.stride(0),
        "stride_q_head": q.stride(1),
        "stride_o_row": o.stride(0),
        "stride_o_head": o.stride(1),
        "stride_lse_row": lse.stride(0),
        "HEAD_TILES": head_tiles,
        "ROWS_ALONE": rows_alone,
        "C": C,
        "R": R,
        "BLOCK_R": dot_size(R),
        "BLOCK_H": tiles.heads,
        "BLOCK_N": tiles.tokens,
        "PRECISION": dot_precision(q.dtype),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    if fp8 is not None:
        layout = fp8.layout
        _attend_fp8[grid](
            **common,
            kv_bytes=storage,
            kv_scales=storage.view(torch.float32),
            kv_rope=storage.view(torch.bfloat16),
            stride_kv=storage.stride(0),
            SCALES_AT=layout.scales_start // 4,
            ROPE_AT=layout.bf16_start // 2,
            NUM_TILES=layout.num_tiles,
            TILE=FP8_TILE,
        )
    else:
        _attend_plain[grid](**common, kv=storage, stride_kv=storage.stride(0), BLOCK_C=dot_size(C))
    if partial_rows:
        assert split is not None
        # Of few rows each is in many parts, of many rows hardly any.
        at_once, columns = (64, 64) if plan.rows <= 4 else (32, 128) if plan.rows <= 16 else (4, 512)
        block_c = min(columns, triton.next_power_of_2(C))
        _merge_parts[(plan.rows, H, triton.cdiv(C, block_c))](
            partial_o,
            partial_lse,
            split.reduce_indptr,
            split.reduce_partial_map,
            o,
            lse,
            split.reduce_partial_map.shape[0],
            H,
            o.stride(0),
            o.stride(1),
            lse.stride(0),
            C=C,
            BLOCK_C=block_c,
            BLOCK_ENTRIES=triton.next_power_of_2(split.num_parts),
            BLOCK_S=at_once,
            num_warps=4 if plan.rows <= 4 else 2,
        )


def _require_types(q: Tensor, kv: StoredVectors) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise PlanError(f"q of {q.dtype}: the Triton kernel takes bfloat16, float16 and float32; use torch's")
    if q.stride(2) != 1:
        raise PlanError("q's last dimension must be contiguous for the Triton kernel")
    known = isinstance(kv.format, PlainFormat) or (
        isinstance(kv.format, Fp8Format) and kv.format.layout.num_fp8 in FP8_LATENTS
    )
    if not known:
        raise PlanError(
            f"KV in {kv.format}: the Triton kernel reads plain vectors, "
            "and fp8 latents of 128, 256 or 512 values"
        )


@triton.jit
def _item_range(work_indptr, max_items, HEAD_TILES: tl.constexpr, ROWS_ALONE: tl.constexpr):
    """The items of this program; never more than there are, whatever the arrays say."""
    part = tl.program_id(0) // HEAD_TILES
    if ROWS_ALONE:
        return part, part + 1
    return tl.load(work_indptr + part), tl.minimum(tl.load(work_indptr + part + 1), max_items)


@triton.jit
def _item(item, kv_indptr, work_info, num_indices, ROWS_ALONE: tl.constexpr):
    """(row, partial row or -1, first KV, end of KV) of an item."""
    if ROWS_ALONE:
        kv_start = tl.load(kv_indptr + item)
        kv_end = tl.minimum(tl.load(kv_indptr + item + 1), num_indices)
        zero = tl.full((), 0, tl.int32)
        return zero + item, zero - 1, kv_start, kv_end
    info = work_info + item * 8
    kv_start = tl.load(info + 4)
    kv_end = tl.minimum(tl.load(info + 5), num_indices)
    return tl.load(info + 2), tl.load(info + 1), kv_start, kv_end


@triton.jit
def _slots(kv_indices, token, kv_end):
    return tl.load(kv_indices + token, mask=token < kv_end, other=-1).to(tl.int64)


@triton.jit
def _weigh(scores, present, peak):
    """(weights, new peak, factor of what was summed before) of scores [H, N] in powers of two."""
    scores = tl.where(present[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # While nothing was present the peak is -inf, and -inf - -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return tl.exp2(scores - base[:, None]), new_peak, tl.exp2(peak - base)


@triton.jit
def _where_to_write(
    row,
    partial,
    head,
    o,
    lse,
    partial_o,
    partial_lse,
    num_heads,
    stride_o_row,
    stride_o_head,
    stride_lse_row,
    C: tl.constexpr,
):
    """(addresses in o, in lse, in the partial o, in the partial lse) of the item's heads."""
    wide_row, part = row.to(tl.int64), tl.maximum(partial, 0).to(tl.int64)
    o_at = o + wide_row * stride_o_row + head * stride_o_head
    lse_at = lse + wide_row * stride_lse_row + head
    partial_o_at = partial_o + (part * num_heads + head) * C
    return o_at, lse_at, partial_o_at, partial_lse + part * num_heads + head


@triton.jit
def _attend_plain(
    q,
    kv,
    kv_indices,
    kv_indptr,
    work_indptr,
    work_info,
    o,
    lse,
    partial_o,
    partial_lse,
    max_items,
    num_indices,
    num_heads,
    score_scale,
    stride_q_row,
    stride_q_head,
    stride_kv,
    stride_o_row,
    stride_o_head,
    stride_lse_row,
    HEAD_TILES: tl.constexpr,
    ROWS_ALONE: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0) % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    column = tl.arange(0, BLOCK_C)
    rope_column = tl.arange(0, BLOCK_R)
    in_c = column < C
    in_r = rope_column < R
    token = tl.arange(0, BLOCK_N)
    dtype = q.dtype.element_ty
    first, end = _item_range(work_indptr, max_items, HEAD_TILES, ROWS_ALONE)
    for item in range(first, end):
        row, partial, kv_start, kv_end = _item(item, kv_indptr, work_info, num_indices, ROWS_ALONE)
        q_at = q + row.to(tl.int64) * stride_q_row + head[:, None] * stride_q_head
        q_c = tl.load(q_at + column[None, :], mask=is_head[:, None] & in_c[None, :], other=0.0)
        q_r = tl.load(q_at + C + rope_column[None, :], mask=is_head[:, None] & in_r[None, :], other=0.0)
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_C], tl.float32)
        slot = _slots(kv_indices, kv_start + token, kv_end)
        for start in range(kv_start, kv_end, BLOCK_N):
            next_slot = _slots(kv_indices, start + BLOCK_N + token, kv_end)
            present = slot >= 0
            kv_at = kv + slot[:, None] * stride_kv
            latent = tl.load(kv_at + column[None, :], mask=present[:, None] & in_c[None, :], other=0.0)
            rope = tl.load(kv_at + C + rope_column[None, :], mask=present[:, None] & in_r[None, :], other=0.0)
            latent = latent.to(dtype)
            scores = tl.dot(q_c, tl.trans(latent), input_precision=PRECISION)
            scores = tl.dot(q_r, tl.trans(rope.to(dtype)), scores, input_precision=PRECISION)
            weights, peak, kept = _weigh(scores * score_scale, present, peak)
            total = total * kept + tl.sum(weights, 1)
            acc = tl.dot(weights.to(dtype), latent, acc * kept[:, None], input_precision=PRECISION)
            slot = next_slot
        o_at, lse_at, partial_o_at, partial_lse_at = _where_to_write(
            row,
            partial,
            head,
            o,
            lse,
            partial_o,
            partial_lse,
            num_heads,
            stride_o_row,
            stride_o_head,
            stride_lse_row,
            C,
        )
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        acc = acc / divisor[:, None]
        row_lse = tl.where(some, (peak + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        mask = is_head[:, None] & in_c[None, :]
        if partial < 0:
            tl.store(o_at[:, None] + column[None, :], acc.to(o.dtype.element_ty), mask=mask)
            tl.store(lse_at, row_lse, mask=is_head)
        else:
            tl.store(partial_o_at[:, None] + column[None, :], acc, mask=mask)
            tl.store(partial_lse_at, row_lse, mask=is_head)


@triton.jit
def _attend_fp8(
    q,
    kv_bytes,
    kv_scales,
    kv_rope,
    kv_indices,
    kv_indptr,
    work_indptr,
    work_info,
    o,
    lse,
    partial_o,
    partial_lse,
    max_items,
    num_indices,
    num_heads,
    score_scale,
    stride_q_row,
    stride_q_head,
    stride_kv,
    stride_o_row,
    stride_o_head,
    stride_lse_row,
    HEAD_TILES: tl.constexpr,
    ROWS_ALONE: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALES_AT: tl.constexpr,
    ROPE_AT: tl.constexpr,
    NUM_TILES: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tile by tile of 128 values: each has its own part of q, its own scale and its own sum."""
    head = tl.program_id(0) % HEAD_TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    column = tl.arange(0, TILE)
    rope_column = tl.arange(0, BLOCK_R)
    in_r = rope_column < R
    token = tl.arange(0, BLOCK_N)
    dtype = q.dtype.element_ty
    first, end = _item_range(work_indptr, max_items, HEAD_TILES, ROWS_ALONE)
    for item in range(first, end):
        row, partial, kv_start, kv_end = _item(item, kv_indptr, work_info, num_indices, ROWS_ALONE)
        q_at = q + row.to(tl.int64) * stride_q_row + head[:, None] * stride_q_head + column[None, :]
        q_0 = tl.load(q_at, mask=is_head[:, None], other=0.0)
        q_1, q_2, q_3 = q_0, q_0, q_0
        if NUM_TILES > 1:
            q_1 = tl.load(q_at + TILE, mask=is_head[:, None], other=0.0)
        if NUM_TILES > 2:
            q_2 = tl.load(q_at + 2 * TILE, mask=is_head[:, None], other=0.0)
            q_3 = tl.load(q_at + 3 * TILE, mask=is_head[:, None], other=0.0)
        q_r = tl.load(
            q + row.to(tl.int64) * stride_q_row + head[:, None] * stride_q_head + C + rope_column[None, :],
            mask=is_head[:, None] & in_r[None, :],
            other=0.0,
        )
        peak = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc_0 = tl.zeros([BLOCK_H, TILE], tl.float32)
        acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
        slot = _slots(kv_indices, kv_start + token, kv_end)
        for start in range(kv_start, kv_end, BLOCK_N):
            next_slot = _slots(kv_indices, start + BLOCK_N + token, kv_end)
            present = slot >= 0
            kv_at = kv_bytes + slot[:, None] * stride_kv + column[None, :]
            scale_at = kv_scales + slot * (stride_kv // 4) + SCALES_AT
            v_0 = _e4m3(tl.load(kv_at, mask=present[:, None], other=0), dtype)
            s_0 = tl.load(scale_at, mask=present, other=0.0)
            scores = tl.dot(q_0, tl.trans(v_0), input_precision=PRECISION) * s_0[None, :]
            v_1, v_2, v_3 = v_0, v_0, v_0
            s_1, s_2, s_3 = s_0, s_0, s_0
            if NUM_TILES > 1:
                v_1 = _e4m3(tl.load(kv_at + TILE, mask=present[:, None], other=0), dtype)
                s_1 = tl.load(scale_at + 1, mask=present, other=0.0)
                scores += tl.dot(q_1, tl.trans(v_1), input_precision=PRECISION) * s_1[None, :]
            if NUM_TILES > 2:
                v_2 = _e4m3(tl.load(kv_at + 2 * TILE, mask=present[:, None], other=0), dtype)
                s_2 = tl.load(scale_at + 2, mask=present, other=0.0)
                scores += tl.dot(q_2, tl.trans(v_2), input_precision=PRECISION) * s_2[None, :]
                v_3 = _e4m3(tl.load(kv_at + 3 * TILE, mask=present[:, None], other=0), dtype)
                s_3 = tl.load(scale_at + 3, mask=present, other=0.0)
                scores += tl.dot(q_3, tl.trans(v_3), input_precision=PRECISION) * s_3[None, :]
            rope = tl.load(
                kv_rope + slot[:, None] * (stride_kv // 2) + ROPE_AT + rope_column[None, :],
                mask=present[:, None] & in_r[None, :],
                other=0.0,
            )
            scores = tl.dot(q_r, tl.trans(rope.to(dtype)), scores, input_precision=PRECISION)
            weights, peak, kept = _weigh(scores * score_scale, present, peak)
            total = total * kept + tl.sum(weights, 1)
            kept = kept[:, None]
            acc_0 = tl.dot((weights * s_0[None, :]).to(dtype), v_0, acc_0 * kept, input_precision=PRECISION)
            if NUM_TILES > 1:
                acc_1 = tl.dot(
                    (weights * s_1[None, :]).to(dtype), v_1, acc_1 * kept, input_precision=PRECISION
                )
            if NUM_TILES > 2:
                acc_2 = tl.dot(
                    (weights * s_2[None, :]).to(dtype), v_2, acc_2 * kept, input_precision=PRECISION
                )
                acc_3 = tl.dot(
                    (weights * s_3[None, :]).to(dtype), v_3, acc_3 * kept, input_precision=PRECISION
                )
            slot = next_slot
        o_at, lse_at, partial_o_at, partial_lse_at = _where_to_write(
            row,
            partial,
            head,
            o,
            lse,
            partial_o,
            partial_lse,
            num_heads,
            stride_o_row,
            stride_o_head,
            stride_lse_row,
            C,
        )
        some = total > 0
        divisor = tl.where(some, total, 1.0)
        row_lse = tl.where(some, (peak + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        if partial < 0:
            tl.store(lse_at, row_lse, mask=is_head)
        else:
            tl.store(partial_lse_at, row_lse, mask=is_head)
        _write_tile(acc_0, divisor, partial, o_at, partial_o_at, is_head, column)
        if NUM_TILES > 1:
            _write_tile(acc_1, divisor, partial, o_at, partial_o_at, is_head, TILE + column)
        if NUM_TILES > 2:
            _write_tile(acc_2, divisor, partial, o_at, partial_o_at, is_head, 2 * TILE + column)
            _write_tile(acc_3, divisor, partial, o_at, partial_o_at, is_head, 3 * TILE + column)


@triton.jit
def _e4m3(stored, dtype: tl.constexpr):
    return stored.to(tl.float8e4nv, bitcast=True).to(dtype)


@triton.jit
def _write_tile(acc, divisor, partial, o_at, partial_o_at, is_head, column):
    acc = acc / divisor[:, None]
    if partial < 0:
        tl.store(o_at[:, None] + column[None, :], acc.to(o_at.dtype.element_ty), mask=is_head[:, None])
    else:
        tl.store(partial_o_at[:, None] + column[None, :], acc, mask=is_head[:, None])


@triton.jit
def _merge_parts(
    partial_o,
    partial_lse,
    reduce_indptr,
    reduce_partial_map,
    o,
    lse,
    max_entries,
    num_heads,
    stride_o_row,
    stride_o_head,
    stride_lse_row,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_ENTRIES: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Some columns of a head of a row: out = sum_s exp(lse_s - lse) out_s over its parts, in their order."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(reduce_indptr + row)
    end = tl.minimum(tl.load(reduce_indptr + row + 1), max_entries)
    if end <= first:
        return
    entry = first + tl.arange(0, BLOCK_ENTRIES)
    part = tl.load(reduce_partial_map + entry, mask=entry < end, other=0).to(tl.int64)
    part_lse = tl.load(partial_lse + part * num_heads + head, mask=entry < end, other=float("-inf"))
    peak = tl.max(part_lse, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(part_lse - peak), 0)
    row_lse = tl.where(total > 0, peak + tl.log(tl.where(total > 0, total, 1.0)), float("-inf"))
    base = tl.where(total > 0, row_lse, 0.0)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = column < C
    acc = tl.zeros([BLOCK_C], tl.float32)
    for at in range(first, end, BLOCK_S):
        tile_entry = at + tl.arange(0, BLOCK_S)
        is_entry = tile_entry < end
        tile_part = tl.load(reduce_partial_map + tile_entry, mask=is_entry, other=0).to(tl.int64)
        tile_lse = tl.load(partial_lse + tile_part * num_heads + head, mask=is_entry, other=float("-inf"))
        weight = tl.exp(tile_lse - base)
        out = tl.load(
            partial_o + (tile_part[:, None] * num_heads + head) * C + column[None, :],
            mask=(weight > 0)[:, None] & in_c[None, :],
            other=0.0,
        )
        acc += tl.sum(weight[:, None] * out, 0)
    wide_row = row.to(tl.int64)
    tl.store(
        o + wide_row * stride_o_row + head * stride_o_head + column, acc.to(o.dtype.element_ty), mask=in_c
    )
    tl.store(lse + wide_row * stride_lse_row + head, row_lse)
