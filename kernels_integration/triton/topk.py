"""The slots of the best tokens of a row by their scores, exactly, in two kernels (of many rows, three).

Scores become 32-bit ranks that grow with them. The first kernel draws a sample of the row, takes from it a
rank that somewhat more than k tokens should reach, and keeps, tile by tile, the tokens that do. The second
finds the k-th largest rank among those few and lists what is chosen. Where the sample misled (fewer than k
reach its rank, or more than there is room for, as where many scores are equal) the second looks at the whole
row instead: slower, and as exact.

T rows, L scores of a row, W tiles of a row. A row's scores count from the first token that it sees.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.triton.local_rows import LocalRows, num_seen, slot_of

_ROOM = 4096
"""Candidates of a row that the second kernel holds, at least; twice as many as are to be chosen."""
_SAMPLED = 16
"""Of so many scores one is drawn, within the next two bounds."""
_FEWEST_SAMPLES, _MOST_SAMPLES = 2048, 8192
_BLOCK = 4096
_FEW_ROWS = 16
_TOKENS_OF_WARP = 256
_MOST_TILES = 16
_LARGEST_TILE = 32768
"""A candidate is kept as its int16 place in the tile."""


def select_best(
    scores: Tensor,
    rows: LocalRows,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    topk: int,
    tile: int | None = None,
    room: int | None = None,
    samples: int | None = None,
) -> None:
    """Slots of the min(topk, visible) tokens of the highest score of each row, ascending by token.

    Written to kv_indices [>= kv_indptr[T]] int32 or int64 at kv_indptr[t]..., where kv_indptr [T + 1] int32
    counts min(topk, visible) for every row. Of equal scores the lower token; -0.0 equals 0.0; NaN counts
    as -inf. scores [T, L] float32 as from `indexer.score_tokens`. tile, room, samples: scores of a program,
    candidates of a row, and scores drawn; powers of two, on which the result does not depend.
    """
    T = rows.num_rows
    width = min(rows.max_visible, scores.shape[1])
    if T == 0 or width == 0:
        return
    tile = tile or _tile_for(T, width)
    room = room or max(_ROOM, 2 * int(triton.next_power_of_2(topk)))
    samples = samples or min(
        _MOST_SAMPLES, max(_FEWEST_SAMPLES, int(triton.next_power_of_2(width)) // _SAMPLED)
    )
    num_tiles = triton.cdiv(width, tile)
    kept = torch.empty(T, num_tiles, tile, dtype=torch.int16, device=scores.device)
    counts = torch.empty(T, num_tiles, dtype=torch.int32, device=scores.device)
    bounds = torch.empty(T, dtype=torch.int64, device=scores.device)
    is_bounded = T > _FEW_ROWS
    if is_bounded:  # else every program draws the row's sample for itself, which saves a launch
        _draw_bounds[(T,)](
            scores,
            rows.visible_from,
            rows.visible_to,
            bounds,
            scores.shape[1],
            rows.page_table.shape[1] * rows.page_size,
            topk,
            scores.stride(0),
            SAMPLES=samples,
            ROOM=room,
            num_warps=8,
        )
    arguments = (
        scores,
        rows.visible_from,
        rows.visible_to,
        kept,
        counts,
        bounds,
        rows.page_table,
        rows.request,
        kv_indptr,
        kv_indices,
        scores.shape[1],
        rows.page_table.shape[1] * rows.page_size,
        topk,
        num_tiles,
        scores.stride(0),
        kv_indices.shape[0],
        rows.page_table.stride(0),
    )
    _keep_candidates[(T, num_tiles)](
        *arguments,
        PAGE_SIZE=rows.page_size,
        TILE=tile,
        BLOCK=min(tile, _BLOCK),
        SAMPLES=samples,
        IS_BOUNDED=is_bounded,
        ROOM=room,
        num_warps=8 if tile >= _BLOCK else 4,
    )
    _list_best[(T,)](
        *arguments,
        PAGE_SIZE=rows.page_size,
        TILE=tile,
        BLOCK_TILES=int(triton.next_power_of_2(num_tiles)),
        ROOM=room,
        num_warps=min(16, max(4, room // _TOKENS_OF_WARP)),
    )


def _tile_for(num_rows: int, width: int) -> int:
    """Few rows are shared by many programs; never so many that their counts are a burden."""
    fewest = 2048 if num_rows <= _FEW_ROWS else _BLOCK if num_rows < 512 else 4 * _BLOCK
    tile = max(fewest, int(triton.next_power_of_2(triton.cdiv(width, _MOST_TILES))))
    return min(tile, max(256, int(triton.next_power_of_2(width))), _LARGEST_TILE)


@triton.jit
def _ranks(scores, column, is_token):
    """uint32 that grow with the scores, NaN as -inf, -0.0 as 0.0; 0, below all others, for no token."""
    score = tl.load(scores + column, mask=is_token, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    rank = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where(is_token, rank, 0)


@triton.jit
def _num_from(ranks, first, second):
    """(how many ranks are `first` or more, how many are `second` or more), of fewer than 2^16."""
    reached = (ranks >= first).to(tl.int32) + ((ranks >= second).to(tl.int32) << 16)
    both = tl.sum(reached, 0)
    return both & 0xFFFF, both >> 16


@triton.jit
def _thirds(low, high):
    """Two ranks that part [low, high), of more than one rank, in thirds; neither is `low`."""
    step = tl.maximum((high - low) // 3, 1)
    return low + step, tl.minimum(low + 2 * step, high)


@triton.jit
def _sampled_bound(scores, count, topk, SAMPLES: tl.constexpr):
    """A rank that somewhat more than topk of the `count` scores should reach."""
    index = tl.arange(0, SAMPLES)
    column = ((index.to(tl.int64) * count) // SAMPLES).to(tl.int32)
    ranks = _ranks(scores, column, index >= 0)
    mean = topk * (SAMPLES / count.to(tl.float32))
    least = tl.minimum(mean + 4.0 * tl.sqrt(mean) + 4.0, SAMPLES * 1.0).to(tl.int32)
    low, high = tl.min(ranks, 0), tl.max(ranks, 0) + 1
    num_low = tl.zeros([], tl.int32) + SAMPLES
    while (high - low > 1) & (num_low > least + least // 16):
        first, second = _thirds(low, high)
        num_first, num_second = _num_from(ranks, first, second)
        num_low = tl.where(num_second >= least, num_second, tl.where(num_first >= least, num_first, num_low))
        new_low = tl.where(num_second >= least, second, tl.where(num_first >= least, first, low))
        high = tl.where(num_second >= least, high, tl.where(num_first >= least, second, first))
        low = new_low
    return low


@triton.jit
def _draw_bounds(
    scores,
    visible_from,
    visible_to,
    bounds,
    num_columns,
    num_tokens,
    topk,
    stride_score,
    SAMPLES: tl.constexpr,
    ROOM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    _, count = num_seen(visible_from, visible_to, row, num_tokens, num_columns)
    if (count > topk) & (count > ROOM):
        bound = _sampled_bound(scores + row * stride_score, count, topk, SAMPLES)
        tl.store(bounds + row, bound.to(tl.int64))


@triton.jit
def _keep_candidates(
    scores,
    visible_from,
    visible_to,
    kept,
    counts,
    bounds,
    page_table,
    request,
    kv_indptr,
    kv_indices,
    num_columns,
    num_tokens,
    topk,
    num_tiles,
    stride_score,
    num_indices,
    stride_page,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLES: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    ROOM: tl.constexpr,
):
    """Keep the places of a tile's candidates, in order; of a row with no more than topk tokens list all."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    start = tile * TILE
    first, count = num_seen(visible_from, visible_to, row, num_tokens, num_columns)
    if start >= count:
        return
    row_scores = scores + row * stride_score
    end = tl.minimum(start + TILE, count)
    offset = tl.arange(0, BLOCK)
    if count <= topk:
        request_at = tl.load(request + row).to(tl.int64) * stride_page
        room = tl.minimum(tl.load(kv_indptr + row + 1), num_indices)
        for at in range(start, end, BLOCK):
            place = tl.load(kv_indptr + row) + at + offset
            is_token = at + offset < end
            slot = slot_of(page_table, request_at, first + at + offset, is_token, PAGE_SIZE)
            tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=is_token & (place < room))
    else:
        bound = tl.zeros([], tl.uint32)
        if count > ROOM:
            if IS_BOUNDED:
                bound = tl.load(bounds + row).to(tl.uint32)
            else:
                bound = _sampled_bound(row_scores, count, topk, SAMPLES)
        kept_at = kept + (row * num_tiles + tile) * TILE
        num_kept = tl.zeros([], tl.int32)
        for at in range(start, end, BLOCK):
            is_token = at + offset < end
            is_kept = (_ranks(row_scores, at + offset, is_token) >= bound) & is_token
            place = num_kept + tl.cumsum(is_kept.to(tl.int32), 0) - 1
            tl.store(kept_at + place, (at - start + offset).to(tl.int16), mask=is_kept)
            num_kept += tl.sum(is_kept.to(tl.int32), 0)
        tl.store(counts + row * num_tiles + tile, num_kept)


@triton.jit
def _kth(ranks, is_token, topk):
    """(the topk-th largest of the tokens' ranks, how many tokens that equal it are chosen)."""
    low, high = tl.min(tl.where(is_token, ranks, 0xFFFFFFFF), 0), tl.max(ranks, 0) + 1
    num_high = tl.zeros([], tl.int32)
    # topk ranks or more are at least `low`, fewer are at least `high`.
    while high - low > 1:
        first, second = _thirds(low, high)
        num_first, num_second = _num_from(ranks, first, second)
        num_high = tl.where(num_second >= topk, num_high, tl.where(num_first >= topk, num_second, num_first))
        new_low = tl.where(num_second >= topk, second, tl.where(num_first >= topk, first, low))
        high = tl.where(num_second >= topk, high, tl.where(num_first >= topk, second, first))
        low = new_low
    return low, topk - num_high


@triton.jit
def _list_best(
    scores,
    visible_from,
    visible_to,
    kept,
    counts,
    bounds,
    page_table,
    request,
    kv_indptr,
    kv_indices,
    num_columns,
    num_tokens,
    topk,
    num_tiles,
    stride_score,
    num_indices,
    stride_page,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The slots of a row's chosen tokens: from its candidates, or, where these do not serve, from all."""
    row = tl.program_id(0).to(tl.int64)
    first, count = num_seen(visible_from, visible_to, row, num_tokens, num_columns)
    if count <= topk:
        return
    row_scores = scores + row * stride_score
    request_at = tl.load(request + row).to(tl.int64) * stride_page
    out = tl.load(kv_indptr + row)
    room = tl.minimum(tl.load(kv_indptr + row + 1), num_indices)
    used_tiles = (count + TILE - 1) // TILE
    tile = tl.arange(0, BLOCK_TILES)
    num_kept = tl.sum(tl.load(counts + row * num_tiles + tile, mask=tile < used_tiles, other=0), 0)
    offset = tl.arange(0, ROOM)
    if (num_kept >= topk) & (num_kept <= ROOM):
        # Which tile a candidate is of: the number of tiles that end before it.
        own_tile, before = tl.zeros([ROOM], tl.int32), tl.zeros([ROOM], tl.int32)
        end = tl.zeros([], tl.int32)
        for t in range(used_tiles):
            num = tl.load(counts + row * num_tiles + t)
            end += num
            is_later = offset >= end
            own_tile += is_later.to(tl.int32)
            before += tl.where(is_later, num, 0)
        is_token = offset < num_kept
        place_at = kept + row * num_tiles * TILE + own_tile * TILE + offset - before
        column = own_tile * TILE + tl.load(place_at, mask=is_token, other=0).to(tl.int32)
        ranks = _ranks(row_scores, column, is_token)
        threshold, free = _kth(ranks, is_token, topk)
        is_tied = (ranks == threshold) & is_token
        chosen = (ranks > threshold) | (is_tied & (tl.cumsum(is_tied.to(tl.int32), 0) <= free))
        place = out + tl.cumsum(chosen.to(tl.int32), 0) - 1
        slot = slot_of(page_table, request_at, first + column, chosen, PAGE_SIZE)
        tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=chosen & (place < room))
    else:
        low, high = tl.zeros([], tl.uint32), tl.zeros([], tl.uint32) + 0xFFFFFFFF
        num_high = tl.zeros([], tl.int32)
        while high - low > 1:
            middle = low + (high - low) // 2
            num = tl.zeros([], tl.int32)
            for at in range(0, count, ROOM):
                ranks = _ranks(row_scores, at + offset, at + offset < count)
                num += tl.sum((ranks >= middle).to(tl.int32), 0)
            num_high = tl.where(num >= topk, num_high, num)
            low = tl.where(num >= topk, middle, low)
            high = tl.where(num >= topk, high, middle)
        free = topk - num_high
        for at in range(0, count, ROOM):
            column = at + offset
            is_token = column < count
            ranks = _ranks(row_scores, column, is_token)
            is_tied = (ranks == low) & is_token
            chosen = (ranks > low) | (is_tied & (tl.cumsum(is_tied.to(tl.int32), 0) <= free))
            place = out + tl.cumsum(chosen.to(tl.int32), 0) - 1
            slot = slot_of(page_table, request_at, first + column, chosen, PAGE_SIZE)
            tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=chosen & (place < room))
            out += tl.sum(chosen.to(tl.int32), 0)
            free -= tl.sum((chosen & is_tied).to(tl.int32), 0)
