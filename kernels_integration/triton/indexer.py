"""The lightning indexer on a GPU: scores of every visible token, and the slots of the best of them.

T rows, B requests, P pages of a request, L local KV tokens, H indexer heads, D indexer dims.
Rows of a request are neighbours: row t belongs to request t // rows_per_request. Tokens count from the
request's first local one; page_table [B, P] holds the block of every page_size of them (with page_size 1:
their slots).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.kv_formats import StoredVectors
from kernels_integration.triton.tiles import dot_precision, dot_size, fp8_format, token_slot

_SCORED_AT_ONCE = 64
_RANKED_AT_ONCE = 2048
_LISTED_AT_ONCE = 1024


def score_tokens(
    q_index: Tensor,
    weights: Tensor,
    index_keys: StoredVectors,
    page_table: Tensor,
    visible_from: Tensor,
    visible_to: Tensor,
    scores: Tensor,
    *,
    page_size: int,
    rows_per_request: int,
) -> None:
    """scores[t, s] = sum_h weights[t, h] relu(q_index[t, h] . key[s] D**-0.5) of the visible tokens s.

    q_index [T, H, D] bfloat16, float16 or float32, contiguous; weights [T, H] float32; visible_from,
    visible_to [T] int; scores [T, L] float32. Tokens that no row of a request sees are not scored; the
    others' scores are written for all its rows. Keys plain, or fp8 of at most 128 dims. Products in q's
    dtype, sums in float32.
    """
    T, H, D = q_index.shape
    B = T // rows_per_request
    L = scores.shape[1]
    storage = index_keys.storage
    fp8 = fp8_format(index_keys)
    scales = storage if fp8 is None else storage.view(torch.float32)
    scale_at = 0 if fp8 is None else fp8.layout.scales_start // 4
    tokens = 32 if q_index.dtype == torch.float32 else _SCORED_AT_ONCE
    _score_tokens[(triton.cdiv(L, tokens), B)](
        q_index,
        weights,
        storage,
        scales,
        page_table,
        visible_from,
        visible_to,
        scores,
        H,
        D**-0.5,
        L,
        page_table.shape[1],
        page_table.stride(0),
        storage.stride(0),
        scores.stride(0),
        weights.stride(0),
        rows_per_request,
        PAGE_SIZE=page_size,
        IS_FP8=fp8 is not None,
        SCALE_AT=scale_at,
        D=D,
        BLOCK_D=dot_size(D),
        BLOCK_H=dot_size(H),
        BLOCK_N=tokens,
        PRECISION=dot_precision(q_index.dtype),
        num_warps=4,
        num_stages=2,
    )


@triton.jit
def _score_tokens(
    q_index,
    weights,
    keys,
    key_scales,
    page_table,
    visible_from,
    visible_to,
    scores,
    num_heads,
    dim_scale,
    num_tokens,
    num_pages,
    stride_page,
    stride_key,
    stride_score,
    stride_weight,
    rows_per_request,
    PAGE_SIZE: tl.constexpr,
    IS_FP8: tl.constexpr,
    SCALE_AT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    request = tl.program_id(1)
    first_row = request * rows_per_request
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    seen_from, seen_to = num_tokens, 0
    for row in range(first_row, first_row + rows_per_request):
        row_from, row_to = tl.load(visible_from + row).to(tl.int32), tl.load(visible_to + row).to(tl.int32)
        is_seen = row_to > row_from
        seen_from = tl.where(is_seen, tl.minimum(seen_from, row_from), seen_from)
        seen_to = tl.where(is_seen, tl.maximum(seen_to, row_to), seen_to)
    seen_to = tl.minimum(seen_to, tl.minimum(num_tokens, num_pages * PAGE_SIZE))
    first_token = tl.program_id(0) * BLOCK_N
    if (first_token >= seen_to) | (first_token + BLOCK_N <= seen_from):
        return
    is_token = (token >= seen_from) & (token < seen_to)
    slot = token_slot(page_table, stride_page, request, token, is_token, PAGE_SIZE)
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
    for row in range(first_row, first_row + rows_per_request):
        wide_row = tl.full((), 0, tl.int64) + row
        q_at = q_index + (wide_row * num_heads + head[:, None]) * D + dim[None, :]
        query = tl.load(q_at, mask=is_head[:, None] & (dim < D)[None, :], other=0.0)
        weight = tl.load(weights + wide_row * stride_weight + head, mask=is_head, other=0.0)
        products = tl.dot(key, tl.trans(query), input_precision=PRECISION) * scale[:, None]
        # A NaN stays one: relu keeps what is not below 0.
        positive = tl.where(products < 0, 0.0, products)
        score = tl.sum(tl.where(is_head[None, :], positive * weight[None, :], 0.0), 1)
        tl.store(scores + wide_row * stride_score + token, score, mask=is_token)


def select_best(
    scores: Tensor,
    page_table: Tensor,
    visible_from: Tensor,
    visible_to: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    topk: int,
    page_size: int,
    rows_per_request: int,
) -> None:
    """Slots of the min(topk, visible) tokens of the highest score of each row, ascending by token.

    Written to kv_indices [>= kv_indptr[T]] int32 or int64 at kv_indptr[t]..., where kv_indptr [T + 1] int32
    counts min(topk, visible) for every row. Of equal scores the lower token; -0.0 equals 0.0; NaN counts
    as -inf. scores [T, L] float32, read where visible only.
    """
    T, L = scores.shape
    _select_best[(T,)](
        scores,
        page_table,
        visible_from,
        visible_to,
        kv_indptr,
        kv_indices,
        min(L, page_table.shape[1] * page_size),
        kv_indices.shape[0],
        topk,
        page_table.stride(0),
        scores.stride(0),
        rows_per_request,
        PAGE_SIZE=page_size,
        BLOCK=_RANKED_AT_ONCE,
        num_warps=8,
    )


@triton.jit
def _ranks(scores, row_at, token, is_token):
    """uint32 that grow with the scores: NaN as -inf, -0.0 as 0.0."""
    score = tl.load(scores + row_at + token, mask=is_token, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _select_best(
    scores,
    page_table,
    visible_from,
    visible_to,
    kv_indptr,
    kv_indices,
    num_tokens,
    num_indices,
    topk,
    stride_page,
    stride_score,
    rows_per_request,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The k-th largest rank digit by digit, from the highest; then one pass that lists what is chosen."""
    row = tl.program_id(0)
    request = row // rows_per_request
    row_at = row.to(tl.int64) * stride_score
    first = tl.maximum(tl.load(visible_from + row).to(tl.int32), 0)
    end = tl.minimum(tl.load(visible_to + row).to(tl.int32), num_tokens)
    offset = tl.arange(0, BLOCK)
    # Without a cut every rank is above the threshold or ties with it, and there is room for all.
    threshold = tl.zeros([], tl.uint32)
    free = tl.zeros([], tl.int32) + topk
    if end - first > topk:
        bin_ = tl.arange(0, 256)
        for digit in tl.static_range(4):
            shift: tl.constexpr = 24 - 8 * digit
            counts = tl.zeros([256], tl.int32)
            for at in range(first, end, BLOCK):
                token = at + offset
                is_token = token < end
                rank = _ranks(scores, row_at, token, is_token)
                if digit > 0:
                    is_token = is_token & (rank >> (shift + 8) == threshold)
                counts += tl.histogram(((rank >> shift) & 255).to(tl.int32), 256, mask=is_token)
            at_least = tl.cumsum(counts, 0, reverse=True)
            chosen_bin = tl.sum((at_least >= free).to(tl.int32), 0) - 1
            free -= tl.sum(tl.where(bin_ == chosen_bin, at_least - counts, 0), 0)
            threshold = (threshold << 8) | chosen_bin.to(tl.uint32)
    out = tl.load(kv_indptr + row)
    room = tl.minimum(tl.load(kv_indptr + row + 1), num_indices)
    num_tied = 0
    for at in range(first, end, BLOCK):
        token = at + offset
        is_token = token < end
        rank = _ranks(scores, row_at, token, is_token)
        tied = is_token & (rank == threshold)
        tied_before = num_tied + tl.cumsum(tied.to(tl.int32), 0)
        chosen = (is_token & (rank > threshold)) | (tied & (tied_before <= free))
        place = out + tl.cumsum(chosen.to(tl.int32), 0) - 1
        slot = token_slot(page_table, stride_page, request, token, chosen, PAGE_SIZE)
        tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=chosen & (place < room))
        num_tied += tl.sum(tied.to(tl.int32), 0)
        out += tl.sum(chosen.to(tl.int32), 0)


def list_visible(
    page_table: Tensor,
    visible_from: Tensor,
    visible_to: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    max_tokens: int,
    page_size: int,
    rows_per_request: int,
) -> None:
    """Slots of every token that a row sees, for dense attention; arguments as for `select_best`.

    max_tokens: host bound of visible_to.
    """
    T = visible_to.shape[0]
    _list_visible[(triton.cdiv(max_tokens, _LISTED_AT_ONCE), T)](
        page_table,
        visible_from,
        visible_to,
        kv_indptr,
        kv_indices,
        min(max_tokens, page_table.shape[1] * page_size),
        kv_indices.shape[0],
        page_table.stride(0),
        rows_per_request,
        PAGE_SIZE=page_size,
        BLOCK=_LISTED_AT_ONCE,
        num_warps=4,
    )


@triton.jit
def _list_visible(
    page_table,
    visible_from,
    visible_to,
    kv_indptr,
    kv_indices,
    num_tokens,
    num_indices,
    stride_page,
    rows_per_request,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1)
    first = tl.maximum(tl.load(visible_from + row).to(tl.int32), 0)
    end = tl.minimum(tl.load(visible_to + row).to(tl.int32), num_tokens)
    token = first + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < end
    slot = token_slot(page_table, stride_page, row // rows_per_request, token, is_token, PAGE_SIZE)
    place = tl.load(kv_indptr + row) + token - first
    room = tl.minimum(tl.load(kv_indptr + row + 1), num_indices)
    tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=is_token & (place < room))
