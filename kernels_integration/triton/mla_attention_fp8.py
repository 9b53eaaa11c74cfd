"""Sparse MLA attention over fp8 vectors, which keep a scale per 128 values.

The scales multiply scores and probabilities, which are few, instead of the vectors. Legend: `mla_attention`.
"""

import triton
import triton.language as tl

from kernels_integration.triton.attention_items import (
    item_range,
    read_item,
    read_slots,
    weigh,
    where_to_write,
)


@triton.jit
def attend_fp8(
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
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
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
    first, end = item_range(
        work_indptr,
        max_items,
        kv_indptr,
        num_indices,
        HEAD_TILES,
        ROWS_ALONE,
        SPLITS,
        SPLIT_TOKENS,
        MOST_SPLITS,
    )
    for item in range(first, end):
        row, partial, kv_start, kv_end = read_item(
            item, kv_indptr, work_info, num_indices, ROWS_ALONE, SPLITS, SPLIT_TOKENS, MOST_SPLITS
        )
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
        slot = read_slots(kv_indices, kv_start + token, kv_end)
        for start in range(kv_start, kv_end, BLOCK_N):
            next_slot = read_slots(kv_indices, start + BLOCK_N + token, kv_end)
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
            weights, peak, kept = weigh(scores * score_scale, present, peak)
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
        o_at, lse_at, partial_o_at, partial_lse_at = where_to_write(
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
