"""Sparse MLA attention in plain torch: the CPU backend and the oracle of all others.

Absorbed form: one latent KV vector per token serves as key (all C + R entries) and value (the first
C). Shape legend: T rows, H heads, C latent rank, R rope part, L gathered KV tokens of a row.
Both functions read the plan's index pointers on the host.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kernels_integration.dcp import merge_partials
from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.plan_check import check_fit

_TILE_BYTES = 1 << 20
"""Gathered KV of a tile of rows: stays in a core's cache between the two products."""


def run(
    plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor, *, sm_scale: float
) -> None:
    """Row t attends to its planned slots of kv: o[t] = softmax(sm_scale q[t] . k) v, lse[t] its natural LSE.

    q [>= T, H, C + R], kv of C + R values a slot in any format, o [as q, H, C] and lse [as q, H] fp32
    (fp64 when q is fp64), for T = plan.rows. Computes in lse's dtype. Writes o and lse in place: rows
    without KV get o = 0, lse = -inf; rows from T on are neither read nor written.

    Memory: tiles of rows whose gathered KV, padded to the longest row of the tile, stays within
    1 MiB; a longer row is a tile of its own.

    Errors: PlanError, before anything is written, when the plan does not fit the tensors.
    """
    kv_indices = check_fit(plan, q, kv, o, lse)
    indptr = plan.kv_indptr.tolist()
    row_bytes = kv.dim * lse.dtype.itemsize
    for first, end, longest in _row_tiles(indptr, max(1, _TILE_BYTES // row_bytes)):
        rows = slice(first, end)
        if longest == 0:
            o[rows] = 0.0
            lse[rows] = float("-inf")
        elif indptr[end] - indptr[first] == (end - first) * longest:
            slots = kv_indices[indptr[first] : indptr[end]]
            _attend_tile(q[rows], kv, slots, None, o[rows], lse[rows], sm_scale)
        else:
            starts, lens = (
                plan.kv_indptr[first:end, None],
                plan.kv_indptr[first : end + 1].diff().unsqueeze(1),
            )
            columns = torch.arange(longest, dtype=torch.int32, device=q.device)
            padding = columns >= lens
            # Padding reads the row's own first slot again: no KV that the row did not select is touched.
            places = (columns.masked_fill(padding, 0) + starts).clamp_max_(indptr[-1] - 1)
            slots = kv_indices.index_select(0, places.view(-1))
            _attend_tile(q[rows], kv, slots, padding, o[rows], lse[rows], sm_scale)
            empty = lens == 0
            o[rows].masked_fill_(empty.unsqueeze(2), 0.0)
            lse[rows].masked_fill_(empty, float("-inf"))


def _attend_tile(
    q: Tensor,
    kv: StoredVectors,
    slots: Tensor,
    padding: Tensor | None,
    o: Tensor,
    lse: Tensor,
    sm_scale: float,
) -> None:
    """Rows q [T, H, C + R] over slots [T * L]; padding [T, L] marks entries that count as absent."""
    T, H, C = o.shape
    keys = kv.gather(slots, lse.dtype).view(T, -1, kv.dim)
    scores = q.new_empty(T, H, keys.shape[1], dtype=lse.dtype)
    torch.baddbmm(scores, q.to(lse.dtype), keys.mT, beta=0, alpha=sm_scale, out=scores)
    if padding is not None:
        scores.masked_fill_(padding.unsqueeze(1), float("-inf"))
    probs = scores.softmax(-1)
    # The largest probability is exp(0) / sum: its logarithm turns the largest score into the LSE.
    torch.sub(scores.amax(-1), probs.amax(-1).log_(), out=lse)
    if o.dtype == lse.dtype:
        torch.bmm(probs, keys[..., :C], out=o)
    else:
        o.copy_(torch.bmm(probs, keys[..., :C]))


def _row_tiles(indptr: Sequence[int], max_tokens: int) -> Iterator[tuple[int, int, int]]:
    """(first row, end row, longest row) of consecutive tiles of at most max_tokens padded KV tokens.

    A row that is longer alone is a tile alone.
    """
    rows, longest = len(indptr) - 1, indptr[1] if len(indptr) > 1 else 0
    if longest and indptr[-1] == rows * longest and indptr == list(range(0, indptr[-1] + 1, longest)):
        tile_rows = max(1, max_tokens // longest)
        for first in range(0, rows, tile_rows):
            yield first, min(first + tile_rows, rows), longest
        return
    first, longest = 0, 0
    for row in range(rows):
        length = indptr[row + 1] - indptr[row]
        if row > first and (row + 1 - first) * max(longest, length) > max_tokens:
            yield first, row, longest
            first, longest = row, length
        else:
            longest = max(longest, length)
    if first < rows:
        yield first, rows, longest


def run_work_items(
    plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor, *, sm_scale: float
) -> None:
    """`run` as a persistent kernel does it: worker by worker, item by item, then the merge of split rows."""
    kv_indices = check_fit(plan, q, kv, o, lse)
    split, C = plan.split, o.shape[2]
    if split is None:
        raise PlanError("the plan has no work items; build it for a number of parts")
    partial_o = lse.new_full((split.num_partial_rows, *o.shape[1:]), float("nan"))
    partial_lse = lse.new_full((split.num_partial_rows, lse.shape[1]), float("nan"))
    work_indptr, work_info = split.work_indptr.tolist(), split.work_info.tolist()
    for worker in range(split.num_parts):
        for item in work_info[work_indptr[worker] : work_indptr[worker + 1]]:
            _, partial, q_start, q_end, kv_start, kv_end, _, _ = item
            item_kv = kv.gather(kv_indices[kv_start:kv_end], lse.dtype)
            item_o, item_lse = _attend(q[q_start:q_end].to(lse.dtype), item_kv, C, sm_scale)
            if partial < 0:
                o[q_start:q_end] = item_o.to(o.dtype)
                lse[q_start:q_end] = item_lse
            else:
                partial_o[partial : partial + q_end - q_start] = item_o
                partial_lse[partial : partial + q_end - q_start] = item_lse
    reduce_indptr, final_map = split.reduce_indptr.tolist(), split.reduce_final_map.tolist()
    for tile, (q_start, q_end) in enumerate(final_map):
        first_rows = split.reduce_partial_map[reduce_indptr[tile] : reduce_indptr[tile + 1]].long()
        if first_rows.numel() == 0:
            continue
        parts = first_rows.unsqueeze(1) + torch.arange(q_end - q_start, device=q.device)
        o[q_start:q_end] = merge_partials(partial_o[parts], partial_lse[parts]).to(o.dtype)
        lse[q_start:q_end] = partial_lse[parts].logsumexp(0)


def _attend(q: Tensor, kv: Tensor, C: int, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Every row of q [T, H, C + R] over all of kv [L, C + R]."""
    if kv.shape[0] == 0:
        return q.new_zeros(*q.shape[:2], C), q.new_full(q.shape[:2], float("-inf"))
    scores = q @ kv.T * sm_scale
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp() @ kv[:, :C], lse
