"""The lightning indexer on a GPU: scores of every visible token; and the slots of all, for dense attention.

T rows, B requests, P pages of a request, L scores of a row, H indexer heads, D indexer dims. Tokens count
from the request's first local one; a row's scores count from the first token that it sees.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.kv_formats import StoredVectors
from kernels_integration.triton.local_rows import LocalRows, num_seen, slot_of
from kernels_integration.triton.tiles import dot_precision, dot_size, fp8_format

_LISTED_AT_ONCE = 1024
_ROWS_AT_ONCE = 4
"""Rows of one request that share what a program reads."""
_PROGRAMS = 528
"""Enough for a device: with more of them each scores more tokens, and reads its queries less often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTiles:
    """How the kernel is cut; the result does not depend on it."""

    tokens: int
    num_warps: int
    num_stages: int

    @classmethod
    def choose(cls, num_shared: int, dtype: torch.dtype, *, is_fp8: bool) -> "ScoreTiles":
        """As measured fastest on an H200. num_shared: rows that share their keys."""
        if dtype == torch.float32:
            return cls(tokens=32, num_warps=4, num_stages=2)
        if is_fp8:
            return cls(tokens=64, num_warps=4, num_stages=3 if num_shared == 1 else 2)
        if num_shared == 1:
            return cls(tokens=128, num_warps=4, num_stages=3)
        return cls(tokens=64, num_warps=8, num_stages=3)


def score_tokens(
    q_index: Tensor,
    weights: Tensor,
    index_keys: StoredVectors,
    rows: LocalRows,
    scores: Tensor,
    *,
    tiles: ScoreTiles | None = None,
) -> None:
    """scores[t, s] = sum_h weights[t, h] relu(q_index[t, h] . key D**-0.5) of the s-th token that row t sees.

    q_index [T, H, D] bfloat16, float16 or float32, contiguous; weights [T, H] float32; scores [T, L >=
    max_visible] float32, written for visible tokens only. Keys plain, or fp8 of at most 128 dims. Products in
    q's dtype (of fp8 keys and bfloat16 in float16, which holds both), sums in float32.
    """
    T, H, D = q_index.shape
    if T == 0 or rows.max_visible == 0:
        return
    storage = index_keys.storage
    fp8 = fp8_format(index_keys)
    shared = min(_ROWS_AT_ONCE, int(triton.next_power_of_2(rows.rows_per_request)))
    groups = T // rows.rows_per_request * triton.cdiv(rows.rows_per_request, shared)
    width = min(rows.max_visible, scores.shape[1])
    tiles = tiles or ScoreTiles.choose(shared, q_index.dtype, is_fp8=fp8 is not None)
    tokens = min(
        2048, max(tiles.tokens, int(triton.next_power_of_2(triton.cdiv(width * groups, _PROGRAMS) + 1)) // 2)
    )
    # Neighbouring programs are rows of one request at the same tokens: they share keys in the L2 cache.
    _score_tokens[(groups, triton.cdiv(width, tokens))](
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
        tokens,
        PAGE_SIZE=rows.page_size,
        IS_FP8=fp8 is not None,
        # e4m3 becomes float16 in half an instruction, bfloat16 in several.
        HALVES=fp8 is not None and q_index.dtype == torch.bfloat16,
        SCALE_AT=0 if fp8 is None else fp8.layout.scales_start // 4,
        D=D,
        BLOCK_D=dot_size(D),
        BLOCK_H=dot_size(H),
        BLOCK_N=tiles.tokens,
        ROWS_PER_REQUEST=rows.rows_per_request,
        ROWS=shared,
        PRECISION=dot_precision(q_index.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
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
    tokens_of_program,
    PAGE_SIZE: tl.constexpr,
    IS_FP8: tl.constexpr,
    HALVES: tl.constexpr,
    SCALE_AT: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS_PER_REQUEST: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some tokens of up to ROWS rows of a request, which share the keys in one product."""
    GROUPS: tl.constexpr = (ROWS_PER_REQUEST + ROWS - 1) // ROWS
    owner = (tl.program_id(0) // GROUPS).to(tl.int64) * ROWS_PER_REQUEST
    first_row = owner + tl.program_id(0) % GROUPS * ROWS
    row = first_row + tl.arange(0, ROWS)
    is_row = row < owner + ROWS_PER_REQUEST
    first = tl.maximum(tl.load(visible_from + first_row), 0).to(tl.int32)
    seen_to = tl.minimum(tl.load(visible_to + row, mask=is_row, other=0), num_tokens).to(tl.int32)
    counts = tl.minimum(tl.maximum(seen_to - first, 0), num_columns)
    count = tl.max(counts, 0)
    start = tl.program_id(1) * tokens_of_program
    if start >= count:
        return
    # Queries of all rows below each other, with the weights of their heads; zero for those that are none.
    line, dim = tl.arange(0, ROWS * BLOCK_H), tl.arange(0, BLOCK_D)
    head, head_row = line % BLOCK_H, first_row + line // BLOCK_H
    is_head = (head < num_heads) & (head_row < owner + ROWS_PER_REQUEST)
    q_at = q_index + (head_row * num_heads + head)[:, None] * D + dim[None, :]
    query = tl.load(q_at, mask=is_head[:, None] & (dim < D)[None, :], other=0.0)
    weight = tl.load(weights + head_row * stride_weight + head, mask=is_head, other=0.0)
    dtype: tl.constexpr = tl.float16 if HALVES else q_index.dtype.element_ty
    if HALVES:
        # A power of two keeps queries within float16, exactly but for those 2^-29 of the largest.
        largest = tl.max(tl.max(tl.abs(query.to(tl.float32)), 1), 0)
        shrink = tl.exp2(tl.floor(14.0 - tl.log2(tl.where(largest > 0, largest, 1.0))))
        query = (query.to(tl.float32) * shrink).to(dtype)
        dim_scale /= shrink
    request_at = tl.load(request + first_row).to(tl.int64) * stride_page
    offset = tl.arange(0, BLOCK_N)
    end = tl.minimum(start + tokens_of_program, count)
    # Slots are read one block ahead of their keys, so that the keys' loads can be pipelined.
    slot = slot_of(page_table, request_at, first + start + offset, start + offset < end, PAGE_SIZE)
    for at in range(start, end, BLOCK_N):
        column = at + offset
        is_token = column < end
        ahead = column + BLOCK_N
        next_slot = slot_of(page_table, request_at, first + ahead, ahead < end, PAGE_SIZE)
        key_at = keys + slot[:, None] * stride_key + dim[None, :]
        mask = is_token[:, None] & (dim < D)[None, :]
        if IS_FP8:
            key = tl.load(key_at, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(dtype)
            scale = tl.load(key_scales + slot * (stride_key // 4) + SCALE_AT, mask=is_token, other=0.0)
            scale *= dim_scale
        else:
            key = tl.load(key_at, mask=mask, other=0.0).to(dtype)
            scale = tl.zeros([BLOCK_N], tl.float32) + dim_scale
        products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
        # A NaN stays one: relu keeps what is not below 0.
        weighted = tl.where(products < 0, 0.0, products) * weight[None, :]
        score = tl.sum(tl.reshape(weighted, (BLOCK_N, ROWS, BLOCK_H)), 2) * scale[:, None]
        score_at = scores + row[None, :] * stride_score + column[:, None]
        tl.store(score_at, score, mask=(column[:, None] < counts[None, :]) & is_row[None, :])
        slot = next_slot


def list_visible(rows: LocalRows, kv_indptr: Tensor, kv_indices: Tensor) -> None:
    """Slots of every token that a row sees, for dense attention; arguments as for `topk.select_best`."""
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
    first, count = num_seen(visible_from, visible_to, row, num_tokens, num_indices)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = column < count
    request_at = tl.load(request + row).to(tl.int64) * stride_page
    slot = slot_of(page_table, request_at, first + column, is_token, PAGE_SIZE)
    place = tl.load(kv_indptr + row) + column
    room = tl.minimum(tl.load(kv_indptr + row + 1), num_indices)
    tl.store(kv_indices + place, slot.to(kv_indices.dtype.element_ty), mask=is_token & (place < room))
