"""The lightning indexer on a GPU: scores of every visible token, and the slots of the best of them.

T rows, B requests, P pages of a request, L scores of a row, H indexer heads, D indexer dims. Tokens count
from the request's first local one; a row's scores count from the first token that it sees.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.kv_formats import StoredVectors
from kernels_integration.triton.tiles import dot_precision, dot_size, fp8_format

_SCORED_AT_ONCE = 64
_RANKED_AT_ONCE = 32768
_CHOSEN_AT_ONCE = 4096
_LISTED_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRows:
    """Which tokens of its request each row sees on this rank, and where they lie."""

    visible_from: Tensor
    """[T] int32 or int64"""
    visible_to: Tensor
    """[T]; at most visible_from: the row sees nothing."""
    request: Tensor
    """[T] int32 or int64: a row of page_table."""
    page_table: Tensor
    """[B, P] int32 or int64: the block of every page_size tokens; with page_size 1 their slots."""
    page_size: int
    max_visible: int
    """The host's upper bound of visible_to - visible_from."""

    @property
    def num_rows(self) -> int:
        return self.visible_to.shape[0]

    def part(self, start: int, end: int) -> "LocalRows":
        """Rows start..end - 1."""
        return LocalRows(
            visible_from=self.visible_from[start:end],
            visible_to=self.visible_to[start:end],
            request=self.request[start:end],
            page_table=self.page_table,
            page_size=self.page_size,
            max_visible=self.max_visible,
        )


def score_tokens(
    q_index: Tensor, weights: Tensor, index_keys: StoredVectors, rows: LocalRows, scores: Tensor
) -> None:
    """scores[t, s] = sum_h weights[t, h] relu(q_index[t, h] . key D**-0.5) of the s-th token that row t sees.

    q_index [T, H, D] bfloat16, float16 or float32, contiguous; weights [T, H] float32; scores [T, L >=
    max_visible] float32, written for visible tokens only. Keys plain, or fp8 of at most 128 dims. Products in
    q's dtype, sums in float32.
    """
    T, H, D = q_index.shape
    if T == 0 or rows.max_visible == 0:
        return
    storage = index_keys.storage
    fp8 = fp8_format(index_keys)
    tokens = 32 if q_index.dtype == torch.float32 else _SCORED_AT_ONCE
    # Neighbouring programs are rows of one request at the same tokens: they share keys in the L2 cache.
    _score_tokens[(T, triton.cdiv(min(rows.max_visible, scores.shape[1]), tokens))](
        q_index,
        weights,
        storage,
        storage if fp8 is None else storage.view(torch.float32),
        rows.page_table,
        rows.visible_from,
        rows.visible_to,
        rows.request,
        scores,
        H,
        D**-0.5,
        scores.shape[1],
        rows.page_table.shape[1] * rows.page_size,
        rows.page_table.stride(0),
        storage.stride(0),
        scores.stride(0),
        weights.stride(0),
        PAGE_SIZE=rows.page_size,
        IS_FP8=fp8 is not None,
        SCALE_AT=0 if fp8 is None else fp8.layout.scales_start // 4,
        D=D,
        BLOCK_D=dot_size(D),
        BLOCK_H=dot_size(H),
        BLOCK_N=tokens,
        PRECISION=dot_precision(q_index.dtype),
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def _seen(visible_from, visible_to, row, num_tokens, most):
    """(first token, number of tokens) of a row: inside its pages, and no more than `most`."""
    first = tl.maximum(tl.load(visible_from + row), 0).to(tl.int32)
    end = tl.minimum(tl.load(visible_to + row), num_tokens).to(tl.int32)
    return first, tl.minimum(tl.maximum(end - first, 0), most)


@triton.jit
def _slot_of(page_table, request_at, token, mask, PAGE_SIZE: tl.constexpr):
    """int64 slots of tokens; request_at: where the request's pages begin."""
    block = tl.load(page_table + request_at + token // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
    return block * PAGE_SIZE + token % PAGE_SIZE


@triton.jit
def _score_tokens(
    q_index,
    weights,
    keys,
    key_scales,
    page_table,
    visible_from,
    visible_to,
    request,
    scores,
    num_heads,
    dim_scale,
    num_columns,
    num_tokens,
    stride_page,
    stride_key,
    stride_score,
    stride_weight,
    PAGE_SIZE: tl.constexpr,
    IS_FP8: tl.constexpr,
    SCALE_AT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first, count = _seen(visible_from, visible_to, row, num_tokens, num_columns)
    start = tl.program_id(1) * BLOCK_N
    if start >= count:
        return
    column = start + tl.arange(0, BLOCK_N)
    is_token = column < count
    request_at = tl.load(request + row).to(tl.int64) * stride_page
    slot = _slot_of(page_table, request_at, first + column, is_token, PAGE_SIZE)
    dim = tl.arange(0, BLOCK_D)
    key_at = keys + slot[:, None] * stride_key + dim[None, :]
    dtype = q_index.dtype.element_ty
    mask = is_token[:, None] & (dim < D)[None, :]
    if IS_FP8:
        key = tl.load(key_at, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(dtype)
        scale = tl.load(key_scales + slot * (stride_key // 4) + SCALE_AT, mask=is_token, other=0.0)
        scale *= dim_scale
    else:
        key = tl.load(key_at, mask=mask, other=0.0).to(dtype)
        scale = tl.zeros([BLOCK_N], tl.float32) + dim_scale
    head = tl.arange(0, BLOCK_H)
    is_head = head < num_heads
    q_at = q_index + (row * num_heads + head[:, None]) * D + dim[None, :]
    query = tl.load(q_at, mask=is_head[:, None] & (dim < D)[None, :], other=0.0)
    weight = tl.load(weights + row * stride_weight + head, mask=is_head, other=0.0)
    products = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale[:, None]
    # A NaN stays one: relu keeps what is not below 0.
    positive = tl.where(products < 0, 0.0, products)
    score = tl.sum(tl.where(is_head[None, :], positive * weight[None, :], 0.0), 1)
    tl.store(scores + row * stride_score + column, score, mask=is_token)


def select_best(scores: Tensor, rows: LocalRows, kv_indptr: Tensor, kv_indices: Tensor, *, topk: int) -> None:
    """Slots of the min(topk, visible) tokens of the highest score of each row, ascending by token.

    Written to kv_indices [>= kv_indptr[T]] int32 or int64 at kv_indptr[t]..., where kv_indptr [T + 1] int32
    counts min(topk, visible) for every row. Of equal scores the lower token; -0.0 equals 0.0; NaN counts
    as -inf. scores [T, L] float32 as from `score_tokens`.
    """
    if rows.num_rows == 0:
        return
    width = min(rows.max_visible, scores.shape[1])
    block = min(_RANKED_AT_ONCE, max(256, triton.next_power_of_2(width)))
    num_tokens = rows.page_table.shape[1] * rows.page_size
    cuts = torch.empty(rows.num_rows, 2, dtype=torch.int64, device=scores.device)
    _find_cut[(rows.num_rows,)](
        scores,
        rows.visible_from,
        rows.visible_to,
        cuts,
        scores.shape[1],
        num_tokens,
        topk,
        scores.stride(0),
        IS_ONE_TILE=width <= block,
        BLOCK=block,
        num_warps=min(32, max(4, block // 1024)),
    )
    _list_chosen[(rows.num_rows, triton.cdiv(width, _CHOSEN_AT_ONCE))](
        scores,
        rows.page_table,
        rows.visible_from,
        rows.visible_to,
        rows.request,
        cuts,
        kv_indptr,
        kv_indices,
        scores.shape[1],
        num_tokens,
        kv_indices.shape[0],
        rows.page_table.stride(0),
        scores.stride(0),
        PAGE_SIZE=rows.page_size,
        BLOCK=_CHOSEN_AT_ONCE,
        COUNTED=4 * _CHOSEN_AT_ONCE,
        num_warps=8,
    )


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
def _num_from(tile, scores, count, least, IS_ONE_TILE: tl.constexpr, BLOCK: tl.constexpr):
    """How many ranks are `least` or more; tile: the first BLOCK of the row."""
    total = tl.sum((tile >= least).to(tl.int32), 0)
    if not IS_ONE_TILE:
        for at in range(BLOCK, count, BLOCK):
            column = at + tl.arange(0, BLOCK)
            rank = _ranks(scores, column, column < count)
            total += tl.sum((rank >= least).to(tl.int32), 0)
    return total


@triton.jit
def _find_cut(
    scores,
    visible_from,
    visible_to,
    cuts,
    num_columns,
    num_tokens,
    topk,
    stride_score,
    IS_ONE_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """cuts[row] = (threshold, free): chosen are ranks above it, and the first `free` that equal it.

    Halves the ranks between which the k-th largest lies until it is alone. The search ends sooner where a
    rank parts the row exactly, as it does where scores do not tie.
    """
    row = tl.program_id(0).to(tl.int64)
    _, count = _seen(visible_from, visible_to, row, num_tokens, num_columns)
    threshold = tl.zeros([], tl.uint32)
    free = tl.zeros([], tl.int32)
    if count > topk:
        row_scores = scores + row * stride_score
        offset = tl.arange(0, BLOCK)
        tile = _ranks(row_scores, offset, offset < count)
        # topk ranks or more are at least `low`, fewer are at least `high`: every rank is below 2^32 - 1.
        low = tl.zeros([], tl.uint32)
        high = tl.zeros([], tl.uint32) + 0xFFFFFFFF
        num_above = tl.zeros([], tl.int32)
        while high - low > 1:
            middle = low + (high - low) // 2
            num_from = _num_from(tile, row_scores, count, middle, IS_ONE_TILE, BLOCK)
            is_exact = num_from == topk
            num_above = tl.where(num_from < topk, num_from, num_above)
            low = tl.where(num_from < topk, low, middle)
            high = tl.where(num_from < topk, middle, tl.where(is_exact, middle + 1, high))
            num_above = tl.where(is_exact, -1, num_above)
        # After an exact parting all from `low` on are chosen, else those above it and some that equal it.
        threshold = tl.where(num_above < 0, low - 1, low)
        free = tl.where(num_above < 0, 0, topk - num_above)
    tl.store(cuts + 2 * row, threshold.to(tl.int64))
    tl.store(cuts + 2 * row + 1, free.to(tl.int64))


@triton.jit
def _list_chosen(
    scores,
    page_table,
    visible_from,
    visible_to,
    request,
    cuts,
    kv_indptr,
    kv_indices,
    num_columns,
    num_tokens,
    num_indices,
    stride_page,
    stride_score,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """BLOCK tokens of a row. Every program counts for itself what is chosen before its own."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    first, count = _seen(visible_from, visible_to, row, num_tokens, num_columns)
    if start >= count:
        return
    row_scores = scores + row * stride_score
    threshold = tl.load(cuts + 2 * row).to(tl.uint32)
    free = tl.load(cuts + 2 * row + 1).to(tl.int32)
    num_above, num_tied = 0, 0
    for at in range(0, start, COUNTED):
        column = at + tl.arange(0, COUNTED)
        before = _ranks(row_scores, column, column < start)
        num_above += tl.sum((before > threshold).to(tl.int32), 0)
        num_tied += tl.sum(((before == threshold) & (column < start)).to(tl.int32), 0)
    column = start + tl.arange(0, BLOCK)
    is_token = column < count
    rank = _ranks(row_scores, column, is_token)
    tied = (rank == threshold) & is_token
    chosen = (rank > threshold) | (tied & (num_tied + tl.cumsum(tied.to(tl.int32), 0) <= free))
    out = tl.load(kv_indptr + row) + num_above + tl.minimum(num_tied, free)
    room = tl.minimum(tl.load(kv_indptr + row + 1), num_indices)
    place = out + tl.cumsum(chosen.to(tl.int32), 0) - 1
    request_at = tl.load(request + row).to(tl.int64) * stride_page
    slot = _slot_of(page_table, request_at, first + column, chosen, PAGE_SIZE)
    tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=chosen & (place < room))


def list_visible(rows: LocalRows, kv_indptr: Tensor, kv_indices: Tensor) -> None:
    """Slots of every token that a row sees, for dense attention; arguments as for `select_best`."""
    if rows.num_rows == 0 or rows.max_visible == 0:
        return
    _list_visible[(rows.num_rows, triton.cdiv(rows.max_visible, _LISTED_AT_ONCE))](
        rows.page_table,
        rows.visible_from,
        rows.visible_to,
        rows.request,
        kv_indptr,
        kv_indices,
        rows.page_table.shape[1] * rows.page_size,
        kv_indices.shape[0],
        rows.page_table.stride(0),
        PAGE_SIZE=rows.page_size,
        BLOCK=_LISTED_AT_ONCE,
        num_warps=4,
    )


@triton.jit
def _list_visible(
    page_table,
    visible_from,
    visible_to,
    request,
    kv_indptr,
    kv_indices,
    num_tokens,
    num_indices,
    stride_page,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first, count = _seen(visible_from, visible_to, row, num_tokens, num_indices)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = column < count
    request_at = tl.load(request + row).to(tl.int64) * stride_page
    slot = _slot_of(page_table, request_at, first + column, is_token, PAGE_SIZE)
    place = tl.load(kv_indptr + row) + column
    room = tl.minimum(tl.load(kv_indptr + row + 1), num_indices)
    tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=is_token & (place < room))
