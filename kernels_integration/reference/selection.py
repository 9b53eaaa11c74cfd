"""Which local KV each row attends to: everything visible, or the indexer's top-k of it.

Shape legend: T rows, B requests, R rows per request, L local KV tokens, H indexer heads, D indexer dim,
K candidates per row and rank, W ranks, n selected.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.rows import RowBatch, RowGroup, Selection

_NO_POSITION = torch.iinfo(torch.int32).max
# Bytes of one tile's scores per head. On two CPUs tried, 1 to 4 MiB is best and 32 MiB is 1.3 times slower.
_CPU_TILE_BYTES = 2 << 20
_DEVICE_TILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Tile:
    """Rows of one group that are selected from together; the whole group where it is small."""

    row_start: int
    row_end: int
    slots: Tensor  # [B, L]
    positions: Tensor  # [L]
    visible: Tensor  # [B, R, L] bool


def select_visible(rows: RowBatch) -> Selection:
    """Every local KV token that a row may see, which is what dense attention reads."""
    tiles = [
        _tile(rows, group, slice(0, group.num_requests), slice(0, group.rows_per_request))
        for group in rows.groups
    ]
    return _selection(
        rows,
        [tile.visible.sum(dim=-1).flatten() for tile in tiles],
        [tile.slots.unsqueeze(1).masked_select(tile.visible) for tile in tiles],
    )


def select_topk(
    q_index: Tensor, weights: Tensor, index_keys: StoredVectors, rows: RowBatch, topk: int, dcp: DcpGroup
) -> Selection:
    """The `min(topk, visible)` tokens of the highest score per row, of which this rank owns a part.

    score(t, s) = sum_h weights[t, h] * relu(q_index[t, h] . index_keys[s] * D**-0.5), computed in float32, or
    float64 when q_index is. Higher score first, then lower position; -0.0 equals 0.0. A score that is NaN
    counts as -inf, so it is taken last but is never out of range. The ranks' selections partition the
    top-k; every rank must call with the same q_index, weights and rows' positions.

    q_index [T, H, D]; weights [T, H], already scaled by H**-0.5; index_keys of D dims, of one layer.
    Errors: CollectiveError under DCP.
    Source: DeepSeek-V3.2 report, equation 1. Under DCP each rank takes a local top-k of the global size,
    which holds its part of the global one; scores and positions are gathered, and every rank cuts at the
    same place.
    """
    if rows.max_visible <= topk:
        return select_visible(rows)
    dtype = torch.float64 if q_index.dtype == torch.float64 else torch.float32
    q_index = q_index.to(dtype) * q_index.shape[-1] ** -0.5
    weights = weights.to(dtype)
    # The most tokens of a window of max_visible that one rank can own: the same number on every rank.
    whole, rest = divmod(rows.max_visible, dcp.interleave * dcp.size)
    width = min(topk, whole * dcp.interleave + min(rest, dcp.interleave))
    counts, slots, positions, scores = [], [], [], []
    for tile, keys in _scoring_tiles(rows, index_keys, q_index):
        row_range = slice(tile.row_start, tile.row_end)
        tile_scores = _scores(q_index[row_range], weights[row_range], keys).view(tile.visible.shape)
        tile_scores = tile_scores.masked_fill_(~tile.visible | tile_scores.isnan(), -torch.inf)
        chosen = _topk_mask(tile_scores, tile.visible, width)
        counts.append(chosen.sum(dim=-1).flatten())
        slots.append(tile.slots.unsqueeze(1).masked_select(chosen))
        if dcp.size > 1:
            positions.append(tile.positions.masked_select(chosen).int())
            scores.append(tile_scores.masked_select(chosen))
    local = _selection(rows, counts, slots)
    if dcp.size == 1:
        return local
    return _keep_global_topk(local, torch.cat(positions), torch.cat(scores), topk, width, dcp)


def _tile(rows: RowBatch, group: RowGroup, requests: slice, request_rows: slice) -> _Tile:
    """Rows `request_rows` of each of `requests`; one of the two covers the group or holds one request."""
    row_start = group.row_start + requests.start * group.rows_per_request + request_rows.start
    num_requests = requests.stop - requests.start
    row_end = row_start + num_requests * (request_rows.stop - request_rows.start)
    shape = (num_requests, request_rows.stop - request_rows.start, 1)
    visible_from = rows.visible_from[row_start:row_end].view(shape)
    visible_to = rows.visible_to[row_start:row_end].view(shape)
    slots, positions = group.kv_slots[requests], group.kv_positions
    if shape[1] < group.rows_per_request:
        # A tile of a long chunk: what lies behind its last row need not be scored.
        end = int(torch.searchsorted(positions, visible_to.max()))
        slots, positions = slots[:, :end], positions[:end]
    visible = (positions >= visible_from) & (positions < visible_to)
    return _Tile(row_start=row_start, row_end=row_end, slots=slots, positions=positions, visible=visible)


def _scoring_tiles(
    rows: RowBatch, index_keys: StoredVectors, q_index: Tensor
) -> Iterator[tuple[_Tile, Tensor]]:
    """Tiles whose scores per head stay below the tile size, each with its keys [B, L, D]."""
    tile_bytes = _CPU_TILE_BYTES if q_index.device.type == "cpu" else _DEVICE_TILE_BYTES
    for group in rows.groups:
        length = group.kv_positions.shape[0]
        row_bytes = max(length, 1) * q_index.shape[1] * q_index.dtype.itemsize
        rows_per_tile = max(tile_bytes // row_bytes, 1)
        requests_per_tile = max(rows_per_tile // group.rows_per_request, 1)
        for first in range(0, group.num_requests, requests_per_tile):
            requests = slice(first, min(first + requests_per_tile, group.num_requests))
            slots = group.kv_slots[requests]
            keys = index_keys.gather(slots.reshape(-1), q_index.dtype).view(*slots.shape, index_keys.dim)
            if requests_per_tile > 1 or rows_per_tile >= group.rows_per_request:
                yield _tile(rows, group, requests, slice(0, group.rows_per_request)), keys
                continue
            for row in range(0, group.rows_per_request, rows_per_tile):
                request_rows = slice(row, min(row + rows_per_tile, group.rows_per_request))
                tile = _tile(rows, group, requests, request_rows)
                yield tile, keys[:, : tile.positions.shape[0]]


def _scores(q_index: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """[rows, L] of scaled q_index [rows, H, D], weights [rows, H] and keys [B, L, D]."""
    num_rows, heads, dim = q_index.shape
    num_requests, length, _ = keys.shape
    q_index = q_index.reshape(num_requests, num_rows // num_requests * heads, dim)
    per_head = torch.bmm(q_index, keys.transpose(1, 2)).relu_().view(num_rows, heads, length)
    return torch.bmm(weights.unsqueeze(1), per_head).squeeze(1)


def _topk_mask(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """The visible entries among the k highest of the last dimension; of tied ones the first. No NaN."""
    if scores.shape[-1] <= k:
        return visible
    threshold = _kth_largest(scores, k)
    above = scores > threshold
    tied = (scores == threshold) & visible
    free = k - above.sum(dim=-1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=-1, dtype=torch.int32) <= free))


def _keep_global_topk(
    local: Selection, positions: Tensor, scores: Tensor, topk: int, width: int, dcp: DcpGroup
) -> Selection:
    """The part of a rank's own top-k (at most `width` per row) that is in the global one.

    positions int32 and scores: [n], along local.kv_indices.
    """
    indptr = local.kv_indptr.long()
    num_rows = indptr.shape[0] - 1
    row = torch.repeat_interleave(indptr.diff())
    cell = row * width + (torch.arange(row.shape[0], device=row.device) - indptr[row])

    # One message: the scores' bits and the positions, both as int32. [T, K] each.
    shape = (num_rows, width)
    padded_scores = scores.new_full(shape, -torch.inf).view(-1).index_copy_(0, cell, scores)
    padded_positions = positions.new_full(shape, _NO_POSITION).view(-1).index_copy_(0, cell, positions)
    score_words = padded_scores.view(torch.int32)
    gathered = dcp.comm.all_gather(torch.cat([score_words, padded_positions]))  # [W, words]
    split = score_words.shape[0]
    all_scores = gathered[:, :split].contiguous().view(scores.dtype).view(-1, *shape)
    all_scores = all_scores.transpose(0, 1).reshape(num_rows, -1)  # [T, W * K]
    all_positions = gathered[:, split:].reshape(-1, *shape).transpose(0, 1).reshape(num_rows, -1)

    # A candidate is in the global top-k when it lies above the k-th score, or ties with it and its position
    # is among the lowest of the tied. All ranks compute the same two limits from the same bits.
    threshold = _kth_largest(all_scores, topk)
    free = topk - (all_scores > threshold).sum(dim=-1, keepdim=True)  # at least 1
    tied_positions = all_positions.masked_fill(all_scores != threshold, _NO_POSITION)
    last_position = _sorted_rows(tied_positions).gather(1, free - 1)
    row_threshold = threshold.view(-1)[row]
    keep = (scores > row_threshold) | ((scores == row_threshold) & (positions <= last_position.view(-1)[row]))
    return Selection(kv_indptr=_indptr(keep)[indptr].int(), kv_indices=local.kv_indices[keep])


def _kth_largest(scores: Tensor, k: int) -> Tensor:
    """[..., 1]; scores hold no NaN and their last dimension is longer than k."""
    if scores.device.type == "cpu":
        # NumPy sorts whole rows with SIMD: 0.7 ms against 6.3 ms of torch.topk for [512, 2000], k = 64.
        return _sorted_rows(scores)[..., -k, None]
    return torch.topk(scores, k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)


def _sorted_rows(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        ordered = x.numpy().copy()
        ordered.sort(axis=-1)
        return torch.from_numpy(ordered)
    return x.sort(dim=-1).values


def _selection(rows: RowBatch, counts: list[Tensor], slots: list[Tensor]) -> Selection:
    if not counts:
        return Selection(
            kv_indptr=torch.zeros(1, dtype=torch.int32, device=rows.positions.device),
            kv_indices=rows.positions.new_empty(0),
        )
    return Selection(kv_indptr=_indptr(torch.cat(counts)).int(), kv_indices=torch.cat(slots))


def _indptr(counts: Tensor) -> Tensor:
    """[n + 1] int64: sums of the first 0, 1, ... n counts."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
