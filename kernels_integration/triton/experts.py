"""Routed experts as two grouped products: rows of one expert share the tiles of its weights.

T rows, K experts a row, E experts held, I their width, M rows of a tile. Pair t * K + k is row t with its
k-th expert.

A pair is a row of one tile only and its sums run over the whole of its input, tile by tile, so its result
does not depend on the other rows; a row's experts are added in the router's order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels_integration.triton.tiles import dot_precision

_PAIRS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """Which pairs each tile of rows holds; shapes depend on T, K and E alone."""

    pairs: Tensor
    """[tiles * M] int32: a pair, or -1."""
    experts: Tensor
    """[tiles] int32: the tile's expert; -1: the tile is not used."""
    rows: int
    """M"""
    chosen: Tensor
    """[T, K] contiguous, as given; first_expert .. first_expert + num_held - 1 are in tiles."""
    first_expert: int
    num_held: int


def group_pairs(
    experts: Tensor, num_experts: int, first_expert: int = 0, *, rows: int | None = None
) -> ExpertTiles:
    """Pairs of experts [T, K] int32 or int64 grouped by expert, ascending within one.

    Experts outside first_expert..first_expert + num_experts - 1 (-1: a row that is not real) are in no tile.
    rows: of a tile; which is fastest depends on how many rows an expert gets, the result does not.
    """
    num_pairs = experts.numel()
    # As measured fastest on an H200; sixteen is the least that a product takes.
    rows = rows or (16 if num_pairs <= 12 * num_experts else 32 if num_pairs <= 48 * num_experts else 64)
    tiles = min(num_pairs, triton.cdiv(num_pairs, rows) + num_experts)
    pairs = torch.empty(tiles * rows, dtype=torch.int32, device=experts.device)
    tile_experts = torch.empty(tiles, dtype=torch.int32, device=experts.device)
    if num_pairs:
        _group_pairs[(num_experts,)](
            experts,
            pairs,
            tile_experts,
            num_pairs,
            tiles,
            num_experts,
            first_expert,
            M=rows,
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK=_PAIRS_AT_ONCE,
            num_warps=4,
        )
    return ExpertTiles(
        pairs=pairs,
        experts=tile_experts,
        rows=rows,
        chosen=experts,
        first_expert=first_expert,
        num_held=num_experts,
    )


@triton.jit
def _group_pairs(
    experts,
    pairs,
    tile_experts,
    num_pairs,
    num_tiles,
    num_experts,
    first_expert,
    M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program e lists the pairs of expert e; every program counts all experts' for itself."""
    own = tl.program_id(0)
    offset = tl.arange(0, BLOCK)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for at in range(0, num_pairs, BLOCK):
        expert = tl.load(experts + at + offset, mask=at + offset < num_pairs, other=-1).to(tl.int32)
        expert -= first_expert
        is_held = (expert >= 0) & (expert < num_experts)
        counts += tl.histogram(
            tl.where(is_held, expert, 0), BLOCK_E, mask=is_held & (at + offset < num_pairs)
        )
    tile_counts = (counts + M - 1) // M
    index = tl.arange(0, BLOCK_E)
    first_tile = tl.sum(tl.where(index < own, tile_counts, 0), 0)
    own_tiles = tl.sum(tl.where(index == own, tile_counts, 0), 0)
    own_count = tl.sum(tl.where(index == own, counts, 0), 0)
    end = first_tile * M
    for at in range(0, num_pairs, BLOCK):
        pair = at + offset
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1).to(tl.int32) - first_expert
        is_own = (expert == own) & (pair < num_pairs)
        place = end + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs + place, pair, mask=is_own)
        end += tl.sum(is_own.to(tl.int32), 0)
    # The rest of the last tile, which is shorter than a tile.
    rest = tl.arange(0, M)
    tl.store(
        pairs + first_tile * M + own_count + rest,
        tl.zeros_like(rest) - 1,
        mask=own_count + rest < own_tiles * M,
    )
    for at in range(0, own_tiles, BLOCK):
        tl.store(
            tile_experts + first_tile + at + offset, own + tl.zeros_like(offset), mask=at + offset < own_tiles
        )
    if own == num_experts - 1:
        used = tl.sum(tile_counts, 0)
        for at in range(used, num_tiles, BLOCK):
            tl.store(tile_experts + at + offset, tl.zeros_like(offset) - 1, mask=at + offset < num_tiles)


def run_experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tiles: ExpertTiles,
    weights: Tensor,
    out: Tensor,
    *,
    weight_first: bool = False,
) -> None:
    """out[t] += sum_k weights[t, k] E_k(x[t]), E(x) = down(silu(gate x) * up x), over the experts held.

    x [T, hidden]; gate_up [E, 2 I, hidden], gate first; down [E, hidden, I]; weights [T, K] float32; out
    [T, hidden], added to and rounded once. x, gate_up and down of one type: bfloat16, float16 or float32;
    products in it, sums in float32; what lies between the two products is rounded to it. weight_first: the
    weights are the long side of a tile on the tensor cores, as in `products`: bits do not depend on
    `ExpertTiles.rows`.
    """
    T, hidden = x.shape
    if T == 0:
        return
    K, width = weights.shape[1], down.shape[2]
    M, num_tiles = tiles.rows, tiles.experts.shape[0]
    block_n, block_k = (32, 32) if x.dtype == torch.float32 else (64, 128)
    inner = torch.empty(T * K, width, dtype=x.dtype, device=x.device)
    outer = torch.empty(T * K, hidden, dtype=torch.float32, device=x.device)
    options = {
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "M": M,
        "PRECISION": dot_precision(x.dtype),
        "WEIGHT_FIRST": weight_first,
        "num_warps": 4,
        "num_stages": 1 if x.dtype == torch.float32 else 4,
    }
    _gate_up[(triton.cdiv(width, block_n), num_tiles)](
        x, gate_up, tiles.pairs, tiles.experts, inner, hidden, width, x.stride(0), K=K, **options
    )
    _down[(triton.cdiv(hidden, block_n), num_tiles)](
        inner, down, tiles.pairs, tiles.experts, weights, outer, width, hidden, **options
    )
    block = min(1024, triton.next_power_of_2(hidden))
    _add_experts[(T, triton.cdiv(hidden, block))](
        outer,
        out,
        tiles.chosen,
        hidden,
        out.stride(0),
        tiles.first_expert,
        tiles.num_held,
        K=K,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _zeros(M: tl.constexpr, BLOCK_N: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    return tl.zeros([BLOCK_N, M] if WEIGHT_FIRST else [M, BLOCK_N], tl.float32)


@triton.jit
def _multiply(rows, tile, acc, PRECISION: tl.constexpr, WEIGHT_FIRST: tl.constexpr):
    """acc + rows tile^T, or its transpose."""
    if WEIGHT_FIRST:
        acc = tl.dot(tile, tl.trans(rows), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(rows, tl.trans(tile), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _gate_up(
    x,
    weight,
    pairs,
    tile_experts,
    inner,
    hidden,
    width,
    stride_x,
    K: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    expert = tl.load(tile_experts + tl.program_id(1))
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * M + tl.arange(0, M))
    is_pair = pair >= 0
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (tl.maximum(pair, 0) // K).to(tl.int64)[:, None] * stride_x + k[None, :]
    gate_at = weight + (expert.to(tl.int64) * 2 * width + column)[:, None] * hidden + k[None, :]
    up_at = gate_at + width.to(tl.int64) * hidden
    gate = _zeros(M, BLOCK_N, WEIGHT_FIRST)
    up = _zeros(M, BLOCK_N, WEIGHT_FIRST)
    for start in range(0, hidden, BLOCK_K):
        in_k = (start + k < hidden)[None, :]
        rows = tl.load(x_at + start, mask=is_pair[:, None] & in_k, other=0.0)
        mask = (column < width)[:, None] & in_k
        gate_tile = tl.load(gate_at + start, mask=mask, other=0.0)
        up_tile = tl.load(up_at + start, mask=mask, other=0.0)
        gate = _multiply(rows, gate_tile, gate, PRECISION, WEIGHT_FIRST)
        up = _multiply(rows, up_tile, up, PRECISION, WEIGHT_FIRST)
    value = gate / (1.0 + tl.exp(-gate)) * up
    if WEIGHT_FIRST:
        value = tl.trans(value)
    inner_at = inner + tl.maximum(pair, 0).to(tl.int64)[:, None] * width + column[None, :]
    mask = is_pair[:, None] & (column < width)[None, :]
    tl.store(inner_at, value.to(inner.dtype.element_ty), mask=mask)


@triton.jit
def _down(
    inner,
    weight,
    pairs,
    tile_experts,
    pair_weights,
    outer,
    width,
    hidden,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    expert = tl.load(tile_experts + tl.program_id(1))
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(1) * M + tl.arange(0, M))
    is_pair = pair >= 0
    wide_pair = tl.maximum(pair, 0).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inner_at = inner + wide_pair[:, None] * width + k[None, :]
    weight_at = weight + (expert.to(tl.int64) * hidden + column)[:, None] * width + k[None, :]
    acc = _zeros(M, BLOCK_N, WEIGHT_FIRST)
    for start in range(0, width, BLOCK_K):
        in_k = (start + k < width)[None, :]
        rows = tl.load(inner_at + start, mask=is_pair[:, None] & in_k, other=0.0)
        tile = tl.load(weight_at + start, mask=(column < hidden)[:, None] & in_k, other=0.0)
        acc = _multiply(rows, tile, acc, PRECISION, WEIGHT_FIRST)
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    acc *= tl.load(pair_weights + wide_pair, mask=is_pair, other=0.0)[:, None]
    outer_at = outer + wide_pair[:, None] * hidden + column[None, :]
    tl.store(outer_at, acc, mask=is_pair[:, None] & (column < hidden)[None, :])


@triton.jit
def _add_experts(
    outer,
    out,
    chosen,
    hidden,
    stride_out,
    first_expert,
    num_held,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A pair whose expert is not held is in no tile: nothing was written for it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    out_at = out + row * stride_out + column
    total = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        expert = tl.load(chosen + row * K + k).to(tl.int32) - first_expert
        is_held = (expert >= 0) & (expert < num_held)
        total += tl.load(outer + (row * K + k) * hidden + column, mask=mask & is_held, other=0.0)
    tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)
