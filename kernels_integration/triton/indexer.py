"""The lightning indexer on a GPU: scores of every visible token.

T rows, B requests, P pages of a request, L scores of a row, H indexer heads, D indexer dims. Tokens count
from the request's first local one; a row's scores count from the first token that it sees.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.kv_formats import StoredVectors
from kernels_integration.triton.local_rows import LocalRows, slot_of
from kernels_integration.triton.tiles import dot_precision, dot_size, fp8_format

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
            return cls(
                tokens=128 if num_shared > 2 else 64, num_warps=4, num_stages=3 if num_shared == 1 else 2
            )
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
    is_fixed: bool = False,
) -> None:
    """scores[t, s] = sum_h weights[t, h] relu(q_index[t, h] . key D**-0.5) of the s-th token that row t sees.

    q_index [T, H, D] bfloat16, float16 or float32, contiguous; weights [T, H] float32; scores [T, L >=
    max_visible] float32, written for visible tokens only. Keys plain, or fp8 of at most 128 dims. Products in
    q's dtype (of fp8 keys and bfloat16 in float16, which holds both), sums in float32. is_fixed: a row's bits
    do not depend on how many rows share their keys: each has products of its own, all of one shape.
    """
    T, H, D = q_index.shape
    if T == 0 or rows.max_visible == 0:
        return
    storage = index_keys.storage
    fp8 = fp8_format(index_keys)
    shared = min(_ROWS_AT_ONCE, int(triton.next_power_of_2(rows.rows_per_request)))
    groups = T // rows.rows_per_request * triton.cdiv(rows.rows_per_request, shared)
    width = min(rows.max_visible, scores.shape[1])
    tiles = tiles or ScoreTiles.choose(1 if is_fixed else shared, q_index.dtype, is_fp8=fp8 is not None)
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
        IS_FIXED=is_fixed,
        PRECISION=dot_precision(q_index.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


@triton.jit
def _queries(
    q_index,
    weights,
    num_heads,
    stride_weight,
    scale,
    end_row,
    first_row,
    LINES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    dtype: tl.constexpr,
    HALVES: tl.constexpr,
):
    """(queries [LINES, D] of rows from first_row on, their weights, what the products count for)."""
    line, dim = tl.arange(0, LINES), tl.arange(0, BLOCK_D)
    head, row = line % BLOCK_H, first_row + line // BLOCK_H
    is_head = (head < num_heads) & (row < end_row)
    q_at = q_index + (row * num_heads + head)[:, None] * D + dim[None, :]
    query = tl.load(q_at, mask=is_head[:, None] & (dim < D)[None, :], other=0.0)
    weight = tl.load(weights + row * stride_weight + head, mask=is_head, other=0.0)
    if HALVES:
        # A power of two keeps queries within float16, exactly but for those 2^-29 of the largest.
        largest = tl.max(tl.max(tl.abs(query.to(tl.float32)), 1), 0)
        shrink = tl.exp2(tl.floor(14.0 - tl.log2(tl.where(largest > 0, largest, 1.0))))
        query = (query.to(tl.float32) * shrink).to(dtype)
        scale /= shrink
    return query, weight, scale


@triton.jit
def _count(row, end_row, visible_to, first, num_tokens, num_columns):
    """Scores of a row; 0 of one that is another request's."""
    seen_to = tl.load(visible_to + row, mask=row < end_row, other=0)
    seen_to = tl.minimum(seen_to, num_tokens).to(tl.int32)
    return tl.minimum(tl.maximum(seen_to - first, 0), num_columns)


@triton.jit
def _score(key, query, weight, scale, PRECISION: tl.constexpr):
    """[N] of one row."""
    products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
    # A NaN stays one: relu keeps what is not below 0.
    return tl.sum(tl.where(products < 0, 0.0, products) * weight[None, :], 1) * scale


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
    IS_FIXED: tl.constexpr,
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
    dtype: tl.constexpr = tl.float16 if HALVES else q_index.dtype.element_ty
    # Queries of all rows below each other, with the weights of their heads; or each row's for itself.
    LINES: tl.constexpr = BLOCK_H if IS_FIXED else ROWS * BLOCK_H
    end_row = owner + ROWS_PER_REQUEST
    query, weight, scale_0 = _queries(
        q_index,
        weights,
        num_heads,
        stride_weight,
        dim_scale,
        end_row,
        first_row,
        LINES,
        D,
        BLOCK_D,
        BLOCK_H,
        dtype,
        HALVES,
    )
    query_1, weight_1, scale_1 = query, weight, scale_0
    query_2, weight_2, scale_2 = query, weight, scale_0
    query_3, weight_3, scale_3 = query, weight, scale_0
    if IS_FIXED and ROWS > 1:
        query_1, weight_1, scale_1 = _queries(
            q_index,
            weights,
            num_heads,
            stride_weight,
            dim_scale,
            end_row,
            first_row + 1,
            LINES,
            D,
            BLOCK_D,
            BLOCK_H,
            dtype,
            HALVES,
        )
    if IS_FIXED and ROWS > 2:
        query_2, weight_2, scale_2 = _queries(
            q_index,
            weights,
            num_heads,
            stride_weight,
            dim_scale,
            end_row,
            first_row + 2,
            LINES,
            D,
            BLOCK_D,
            BLOCK_H,
            dtype,
            HALVES,
        )
        query_3, weight_3, scale_3 = _queries(
            q_index,
            weights,
            num_heads,
            stride_weight,
            dim_scale,
            end_row,
            first_row + 3,
            LINES,
            D,
            BLOCK_D,
            BLOCK_H,
            dtype,
            HALVES,
        )
    request_at = tl.load(request + first_row).to(tl.int64) * stride_page
    offset, dim = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
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
        else:
            key = tl.load(key_at, mask=mask, other=0.0).to(dtype)
            scale = tl.full([BLOCK_N], 1.0, tl.float32)
        if IS_FIXED:
            out = scores + column
            score = _score(key, query, weight, scale * scale_0, PRECISION)
            tl.store(
                out + (first_row) * stride_score,
                score,
                mask=column < _count(first_row, end_row, visible_to, first, num_tokens, num_columns),
            )
            if ROWS > 1:
                score = _score(key, query_1, weight_1, scale * scale_1, PRECISION)
                tl.store(
                    out + (first_row + 1) * stride_score,
                    score,
                    mask=column < _count(first_row + 1, end_row, visible_to, first, num_tokens, num_columns),
                )
            if ROWS > 2:
                score = _score(key, query_2, weight_2, scale * scale_2, PRECISION)
                tl.store(
                    out + (first_row + 2) * stride_score,
                    score,
                    mask=column < _count(first_row + 2, end_row, visible_to, first, num_tokens, num_columns),
                )
                score = _score(key, query_3, weight_3, scale * scale_3, PRECISION)
                tl.store(
                    out + (first_row + 3) * stride_score,
                    score,
                    mask=column < _count(first_row + 3, end_row, visible_to, first, num_tokens, num_columns),
                )
        else:
            products = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            # A NaN stays one: relu keeps what is not below 0.
            weighted = tl.where(products < 0, 0.0, products) * weight[None, :]
            score = tl.sum(tl.reshape(weighted, (BLOCK_N, ROWS, BLOCK_H)), 2) * (scale * scale_0)[:, None]
            score_at = scores + row[None, :] * stride_score + column[:, None]
            tl.store(score_at, score, mask=(column[:, None] < counts[None, :]) & is_row[None, :])
        slot = next_slot
