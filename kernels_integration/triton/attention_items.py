"""What the attention kernels share: which KV an item has, its weights, where its part goes; and the merge.

A row's items come from the plan's split; or, in fixed splits, from the row's own number of tokens alone, so
that its sums are the same whatever the other rows are.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

SPLIT_TOKENS = 256
MOST_SPLITS = 64
_FULL = 0.9
"""Of the device, the least that even splits fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSplits:
    """How rows are cut at fixed places, whatever the other rows are."""

    most_tokens: int
    """Of any row."""
    tokens: int = SPLIT_TOKENS
    """Of one part, but twice, four times, .. as many where a row would have more than MOST_SPLITS parts."""
    tile_rows: int = 64
    """For how many rows tiles are chosen: bits depend on tiles."""

    @property
    def most_parts(self) -> int:
        """Of a row."""
        return max(1, min(MOST_SPLITS, -(-self.most_tokens // self.tokens)))


def even_splits(
    rows: int, most_tokens: int, num_multiprocessors: int, kv_item_bytes: int
) -> FixedSplits | None:
    """Parts of rows of about most_tokens that fill the device, if there are such: faster than a plan's split.

    As measured on an H200: of fp8 and of many rows a multiprocessor runs two programs side by side.
    """
    is_fp8 = kv_item_bytes == 1
    num_programs = num_multiprocessors * (2 if is_fp8 or rows >= 32 else 1)
    fewest_tokens = 64 if is_fp8 else 128
    parts = 1
    while most_tokens >= parts * fewest_tokens:
        turns = -(-rows * parts // num_programs)
        is_full = rows * parts >= _FULL * turns * num_programs
        if is_full and (turns == 1 or parts == 1):
            return FixedSplits(most_tokens=most_tokens, tokens=-(-most_tokens // parts), tile_rows=rows)
        parts *= 2
    return None


@triton.jit
def _split_size(length, SPLIT_TOKENS: tl.constexpr, MOST_SPLITS: tl.constexpr):
    size = tl.zeros_like(length) + SPLIT_TOKENS
    while size * MOST_SPLITS < length:
        size *= 2
    return size


@triton.jit
def _row_range(row, kv_indptr, num_indices):
    return tl.load(kv_indptr + row), tl.minimum(tl.load(kv_indptr + row + 1), num_indices)


@triton.jit
def item_range(
    work_indptr,
    max_items,
    kv_indptr,
    num_indices,
    HEAD_TILES: tl.constexpr,
    ROWS_ALONE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """The items of this program; never more than there are, whatever the arrays say."""
    part = tl.program_id(0) // HEAD_TILES
    if SPLITS > 0:
        kv_start, kv_end = _row_range(part // SPLITS, kv_indptr, num_indices)
        length = kv_end - kv_start
        index = part % SPLITS
        has_any = (index == 0) | (index * _split_size(length, SPLIT_TOKENS, MOST_SPLITS) < length)
        return part, part + has_any.to(tl.int32)
    if ROWS_ALONE:
        return part, part + 1
    return tl.load(work_indptr + part), tl.minimum(tl.load(work_indptr + part + 1), max_items)


@triton.jit
def read_item(
    item,
    kv_indptr,
    work_info,
    num_indices,
    ROWS_ALONE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """(row, partial row or -1, first KV, end of KV) of an item."""
    if SPLITS > 0:
        row = item // SPLITS
        kv_start, kv_end = _row_range(row, kv_indptr, num_indices)
        size = _split_size(kv_end - kv_start, SPLIT_TOKENS, MOST_SPLITS)
        partial = tl.where(kv_end - kv_start > size, item, -1)
        start = kv_start + item % SPLITS * size
        return row, partial, start, tl.minimum(start + size, kv_end)
    if ROWS_ALONE:
        kv_start, kv_end = _row_range(item, kv_indptr, num_indices)
        zero = tl.full((), 0, tl.int32)
        return zero + item, zero - 1, kv_start, kv_end
    info = work_info + item * 8
    kv_start = tl.load(info + 4)
    kv_end = tl.minimum(tl.load(info + 5), num_indices)
    return tl.load(info + 2), tl.load(info + 1), kv_start, kv_end


@triton.jit
def read_slots(kv_indices, token, kv_end):
    return tl.load(kv_indices + token, mask=token < kv_end, other=-1).to(tl.int64)


@triton.jit
def weigh(scores, present, peak):
    """(weights, new peak, factor of what was summed before) of scores [H, N] in powers of two."""
    scores = tl.where(present[None, :], scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # While nothing was present the peak is -inf, and -inf - -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    return tl.exp2(scores - base[:, None]), new_peak, tl.exp2(peak - base)


@triton.jit
def where_to_write(
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
def merge_parts(
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


@triton.jit
def merge_fixed(
    partial_o,
    partial_lse,
    kv_indptr,
    o,
    lse,
    num_indices,
    num_heads,
    stride_o_row,
    stride_o_head,
    stride_lse_row,
    C: tl.constexpr,
    BLOCK_C: tl.constexpr,
    AT_ONCE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """`merge_parts` of fixed splits, added one after the other; AT_ONCE are read together."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    kv_start, kv_end = _row_range(row, kv_indptr, num_indices)
    size = _split_size(kv_end - kv_start, SPLIT_TOKENS, MOST_SPLITS)
    num_parts = (kv_end - kv_start + size - 1) // size
    if num_parts <= 1:
        return
    first = row.to(tl.int64) * SPLITS
    peak = tl.full((), float("-inf"), tl.float32)
    for at in range(0, num_parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            part_lse = tl.load(
                partial_lse + (first + at + i) * num_heads + head,
                mask=at + i < num_parts,
                other=float("-inf"),
            )
            peak = tl.maximum(peak, part_lse)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    column = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_c = column < C
    total = tl.zeros((), tl.float32)
    acc = tl.zeros([BLOCK_C], tl.float32)
    for at in range(0, num_parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            is_part = at + i < num_parts
            part = (first + at + i) * num_heads + head
            weight = tl.exp(tl.load(partial_lse + part, mask=is_part, other=float("-inf")) - peak)
            out = tl.load(partial_o + part * C + column, mask=is_part & in_c, other=0.0)
            total += weight
            acc += weight * tl.where(weight > 0, out, 0.0)
    divisor = tl.where(total > 0, total, 1.0)
    row_lse = tl.where(total > 0, peak + tl.log(divisor), float("-inf"))
    o_at = o + row.to(tl.int64) * stride_o_row + head * stride_o_head + column
    tl.store(o_at, (acc / divisor).to(o.dtype.element_ty), mask=in_c)
    tl.store(lse + row.to(tl.int64) * stride_lse_row + head, row_lse)
