"""The sparse MLA plan: which rows of q attend to which KV slots, cut into work items for workers.

Arrays, splitting rule and invariants are those of aiter's persistent MLA kernels (serial v1.2
planner of ROCm/aiter, page size 1, one query token per row).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor

from kernels_integration.errors import PlanError

BLOCK_TOKENS = 16
"""KV tokens of one unit of work."""
ITEM_BLOCKS = 16
"""The fixed cost of a work item, in blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseMLAPlan:
    """Row t attends to the slots kv_indices[kv_indptr[t]:kv_indptr[t + 1]]; workers run the items.

    A plan made on a device has arrays of their largest possible size, so that their shapes do not
    depend on the lengths: `work_indptr` and `reduce_indptr` tell what is used. On the CPU the arrays
    are cut to what is used and otherwise equal.
    """

    rows: int
    num_parts: int
    kv_indptr: Tensor
    """[rows + 1] int32, cumulative KV tokens."""
    kv_indices: Tensor | None
    """[>= kv_indptr[rows]] int32 or int64 slots; None: only the split is planned."""
    work_indptr: Tensor
    """[num_parts + 1] int32: worker c runs the items work_indptr[c]..work_indptr[c + 1] - 1 in order."""
    work_info: Tensor
    """[n, 8] int32: batch_idx, partial_qo_loc, qo_start, qo_end, kv_start, kv_end, kv_offset, 0.

    kv_start and kv_end count in kv_indices; kv_offset = tokens of the row after kv_end;
    partial_qo_loc = -1: the item is the whole row and writes the final output.
    """
    reduce_indptr: Tensor
    """[rows + 1] int32: entries of row t in reduce_partial_map; none: the row is not split."""
    reduce_final_map: Tensor
    """[rows, 2] int32: qo_start, qo_end of a split row; -1, -1 of an unsplit one."""
    reduce_partial_map: Tensor
    """[entries] int32: the partial row that each part of a split row writes."""
    num_partial_rows: int
    """Partial rows that a backend must provide."""

    def with_indices(self, kv_indices: Tensor, kv_indptr: Tensor | None = None) -> "SparseMLAPlan":
        """The same split over other slots. Every row must have as many of them as it had here.

        kv_indptr, where given, replaces this plan's array; PlanError when it is of another row count.
        """
        if kv_indptr is None:
            return replace(self, kv_indices=kv_indices)
        if kv_indptr.shape[0] != self.rows + 1:
            raise PlanError(
                f"kv_indptr of {kv_indptr.shape[0] - 1} rows for a plan of {self.rows}: "
                "a split serves the rows that it was built for; build a plan for the other rows"
            )
        return replace(self, kv_indices=kv_indices, kv_indptr=kv_indptr)


def build_plan(
    kv_lens: Sequence[int] | Tensor, num_parts: int, *, kv_indices: Tensor | None = None
) -> SparseMLAPlan:
    """Plans rows of the given KV lengths [rows] for num_parts workers.

    Errors: PlanError for num_parts < 1 and, on the host, for a negative length.
    """
    lens = kv_lens if isinstance(kv_lens, Tensor) else torch.tensor(list(kv_lens), dtype=torch.int32)
    if lens.device.type == "cpu" and lens.numel() and int(lens.min()) < 0:
        raise PlanError(
            f"KV length {int(lens.min())} of row {int(lens.argmin())}: "
            "lengths are 0 or more; a row without KV has 0"
        )
    kv_indptr = torch.zeros(lens.shape[0] + 1, dtype=torch.int32, device=lens.device)
    kv_indptr[1:] = lens.cumsum(0)
    return plan_from_indptr(kv_indptr, num_parts, kv_indices=kv_indices)


def plan_from_indptr(kv_indptr: Tensor, num_parts: int, *, kv_indices: Tensor | None = None) -> SparseMLAPlan:
    """`build_plan` from cumulative lengths kv_indptr [rows + 1]; on a device it never waits for the host."""
    if num_parts < 1:
        raise PlanError(f"num_parts {num_parts}: a plan needs at least one worker; use 1 or more")
    kv_indptr = kv_indptr.to(torch.int32)
    if num_parts == 1 or kv_indptr.shape[0] == 1:
        return _plan_unsplit(kv_indptr, num_parts, kv_indices)
    plan = _plan_split(kv_indptr, num_parts, kv_indices)
    return _cut_to_used(plan) if kv_indptr.device.type == "cpu" else plan


def _plan_unsplit(kv_indptr: Tensor, num_parts: int, kv_indices: Tensor | None) -> SparseMLAPlan:
    """One worker runs every row whole: the common plan of CPU shards, rebuilt per layer under DCP."""
    rows, device = kv_indptr.shape[0] - 1, kv_indptr.device
    row_bounds = torch.arange(rows + 1, dtype=torch.int32, device=device)
    row = row_bounds[:-1]
    reduce_indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    zero = reduce_indptr[:-1]
    reduce_final_map = torch.full((rows, 2), -1, dtype=torch.int32, device=device)
    work_info = torch.stack(
        (row, reduce_final_map[:, 0], row, row_bounds[1:], kv_indptr[:-1], kv_indptr[1:], zero, zero), 1
    )
    work_indptr = torch.full((num_parts + 1,), rows, dtype=torch.int32, device=device)
    work_indptr[0] = 0
    return SparseMLAPlan(
        rows=rows,
        num_parts=num_parts,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        work_indptr=work_indptr,
        work_info=work_info,
        reduce_indptr=reduce_indptr,
        reduce_final_map=reduce_final_map,
        reduce_partial_map=torch.empty(0, dtype=torch.int32, device=device),
        num_partial_rows=0,
    )


def _plan_split(kv_indptr: Tensor, num_parts: int, kv_indices: Tensor | None) -> SparseMLAPlan:
    """The split in fixed shapes: at most rows + num_parts - 1 items, each start a row's or a worker's.

    All rows lie one after the other on a line of cost, row t at row_cost[t]..row_cost[t + 1], of which
    the last ITEM_BLOCKS are its fixed cost. A worker that starts at v ends at
    max(v + payload - ITEM_BLOCKS, the last row end up to v + payload): after whole rows only, or inside
    a row whose partial item must pay its own fixed cost.
    """
    rows, device = kv_indptr.shape[0] - 1, kv_indptr.device
    row_kv = kv_indptr.long()
    row_blocks = (row_kv.diff() + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    row_cost = row_kv.new_zeros(rows + 1)
    row_cost[1:] = (row_blocks + ITEM_BLOCKS).cumsum(0)
    total = row_cost[-1:]
    payload = (total + num_parts - 1) // num_parts + ITEM_BLOCKS

    worker_starts = [row_cost[:1]]
    for _ in range(num_parts - 1):
        reach = worker_starts[-1] + payload
        whole_rows = row_cost.index_select(0, torch.searchsorted(row_cost, reach, right=True) - 1)
        worker_starts.append(torch.minimum(torch.maximum(reach - ITEM_BLOCKS, whole_rows), total))
    worker_bounds = torch.cat((*worker_starts, total))

    inner = worker_bounds[1:-1]
    inner_row = torch.searchsorted(row_cost, inner, right=True) - 1
    # A worker that begins with a row adds no item: moved to the end of the line, past all items.
    inner = torch.where(row_cost[inner_row] == inner, total, inner)
    starts = torch.cat((row_cost[:-1], inner)).sort().values
    work_indptr = torch.searchsorted(starts, worker_bounds)

    used = starts < total
    row = (torch.searchsorted(row_cost, starts, right=True) - 1).clamp_max(rows - 1)
    ends = torch.cat((starts[1:], total))
    row_first, row_last = row_kv[row], row_kv[row + 1]
    kv_start = row_first + (starts - row_cost[row]) * BLOCK_TOKENS
    kv_end = torch.where(
        ends < row_cost[row + 1], row_first + (ends - row_cost[row]) * BLOCK_TOKENS, row_last
    )

    row_items = torch.searchsorted(starts, row_cost)
    item_counts = row_items.diff()
    split = item_counts > 1
    reduce_indptr = torch.zeros(rows + 1, dtype=torch.int64, device=device)
    reduce_indptr[1:] = (item_counts * split).cumsum(0)
    item_ids = torch.arange(starts.shape[0], device=device)
    partial = torch.where(split[row], reduce_indptr[row] + item_ids - row_items[row], -1)

    work_info = torch.stack(
        (row, partial, row, row + 1, kv_start, kv_end, row_last - kv_end, torch.zeros_like(row)), 1
    )
    row_ids = torch.arange(rows, dtype=torch.int32, device=device)
    final_map = torch.stack((row_ids, row_ids + 1), 1)
    max_entries = min(rows + num_parts - 1, 2 * (num_parts - 1))
    return SparseMLAPlan(
        rows=rows,
        num_parts=num_parts,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        work_indptr=work_indptr.int(),
        work_info=(work_info * used.unsqueeze(1)).int(),
        reduce_indptr=reduce_indptr.int(),
        reduce_final_map=final_map.where(split.unsqueeze(1), -1),
        reduce_partial_map=torch.arange(max_entries, dtype=torch.int32, device=device),
        num_partial_rows=max_entries,
    )


def _cut_to_used(plan: SparseMLAPlan) -> SparseMLAPlan:
    num_entries = int(plan.reduce_indptr[-1])
    return replace(
        plan,
        work_info=plan.work_info[: int(plan.work_indptr[-1])],
        reduce_partial_map=plan.reduce_partial_map[:num_entries],
        num_partial_rows=num_entries,
    )


def validate_plan(plan: SparseMLAPlan, *, num_slots: int | None = None) -> None:
    """Checks all that a single plan can show of the invariants, for tests and debug runs.

    num_slots: size of the cache that kv_indices must stay inside. Reads device arrays on the host.
    Errors: PlanError that names the broken invariant.
    """
    row_kv = _checked_indptr("kv_indptr", plan.kv_indptr, plan.rows)
    if plan.kv_indices is not None:
        _check_indices(plan.kv_indices, int(row_kv[-1]), num_slots)
    work_indptr = _checked_indptr("work_indptr", plan.work_indptr, plan.num_parts)
    if work_indptr[-1] > plan.work_info.shape[0]:
        _refuse(
            _BOUNDS, f"work_indptr ends at {work_indptr[-1]}, work_info has {plan.work_info.shape[0]} items"
        )
    items = plan.work_info[: int(work_indptr[-1])].cpu().long()
    _check_bounds(items, plan.rows, int(row_kv[-1]))
    # Rows may be spread over workers in any order; the items of one row keep theirs.
    items = items[items[:, 0].argsort(stable=True)]
    item_counts = items[:, 0].bincount(minlength=plan.rows)
    _check_empty_rows(items, item_counts, row_kv)
    _check_query_rows(items, item_counts)
    _check_kv_tiling(items, row_kv)
    _check_merges(plan, items, item_counts)


_TILING = "1 (the items of a row tile its KV exactly once, in order)"
_QUERY_ROWS = "2 (every planned row is written exactly once, directly or by the merge)"
_MERGES = "3 (one merge tile of 2 or more disjoint partial rows per split row, none for others)"
_BOUNDS = "4 (no item, index or pointer reaches past the planned rows and their KV)"
_EMPTY_ROWS = "5 (a row without KV has exactly one empty item, other rows none)"


def _refuse(invariant: str, what: str) -> NoReturn:
    raise PlanError(f"plan breaks invariant {invariant}: {what}; build a plan for these rows and lengths")


def _refuse_where(bad: Tensor, invariant: str, what: str) -> None:
    if bool(bad.any()):
        _refuse(invariant, f"{what} {int(bad.int().argmax())}")


def _checked_indptr(name: str, indptr: Tensor, length: int) -> Tensor:
    values = indptr.cpu().long()
    if values.shape != (length + 1,):
        _refuse(_BOUNDS, f"{name} has shape {tuple(values.shape)} instead of ({length + 1},)")
    if values[0] != 0:
        _refuse(_BOUNDS, f"{name} starts at {values[0]} instead of 0")
    _refuse_where(values.diff() < 0, _BOUNDS, f"{name} falls after entry")
    return values


def _check_indices(kv_indices: Tensor, num_tokens: int, num_slots: int | None) -> None:
    if kv_indices.shape[0] < num_tokens:
        _refuse(_BOUNDS, f"kv_indptr ends at {num_tokens}, kv_indices has {kv_indices.shape[0]} entries")
    slots = kv_indices[:num_tokens].cpu()
    _refuse_where(slots < 0, _BOUNDS, "a slot below 0 at kv_indices entry")
    if num_slots is not None:
        _refuse_where(slots >= num_slots, _BOUNDS, f"a slot past the cache's {num_slots} at kv_indices entry")


def _check_bounds(items: Tensor, rows: int, num_tokens: int) -> None:
    batch_idx, _, qo_start, qo_end, kv_start, kv_end, _, _ = items.unbind(1)
    outside = (batch_idx < 0) | (batch_idx >= rows) | (qo_start < 0) | (qo_end > rows)
    _refuse_where(outside, _BOUNDS, f"a q row outside 0..{rows - 1} in item")
    outside = (kv_start < 0) | (kv_end > num_tokens)
    _refuse_where(outside, _BOUNDS, f"KV outside the {num_tokens} planned tokens in item")


def _check_query_rows(items: Tensor, item_counts: Tensor) -> None:
    row, partial, qo_start, qo_end = items[:, :4].unbind(1)
    _refuse_where(item_counts == 0, _QUERY_ROWS, "no item writes row")
    _refuse_where(
        (qo_start != row) | (qo_end != row + 1), _QUERY_ROWS, "a q range that is not its row in row"
    )
    split = item_counts[row] > 1
    _refuse_where(
        split & (partial < 0), _QUERY_ROWS, "a direct write beside others to the row of sorted item"
    )
    _refuse_where(~split & (partial != -1), _QUERY_ROWS, "a partial write of an unsplit row by sorted item")


def _check_empty_rows(items: Tensor, item_counts: Tensor, row_kv: Tensor) -> None:
    row_empty = row_kv.diff() == 0
    _refuse_where(row_empty & (item_counts > 1), _EMPTY_ROWS, "several items for row")
    empty = items[:, 4] == items[:, 5]
    _refuse_where(empty & ~row_empty[items[:, 0]], _EMPTY_ROWS, "an empty item of a row with KV: sorted item")


def _check_kv_tiling(items: Tensor, row_kv: Tensor) -> None:
    row, kv_start, kv_end, kv_offset = items[:, 0], items[:, 4], items[:, 5], items[:, 6]
    opens = torch.ones_like(row, dtype=torch.bool)
    opens[1:] = row[1:] != row[:-1]
    expected_start = torch.where(opens, row_kv[row], kv_end.roll(1))
    _refuse_where(kv_start != expected_start, _TILING, "a gap or an overlap before sorted item")
    _refuse_where(kv_end < kv_start, _TILING, "an item that ends before it starts: sorted item")
    closes = opens.roll(-1)
    _refuse_where(
        closes & (kv_end != row_kv[row + 1]), _TILING, "KV left over after the row's last, sorted item"
    )
    wrong_offset = kv_offset != row_kv[row + 1] - kv_end
    _refuse_where(
        wrong_offset, _TILING, "a kv_offset that is not the row's tokens after kv_end in sorted item"
    )


def _check_merges(plan: SparseMLAPlan, items: Tensor, item_counts: Tensor) -> None:
    reduce_indptr = _checked_indptr("reduce_indptr", plan.reduce_indptr, plan.rows)
    num_entries = int(reduce_indptr[-1])
    if num_entries > plan.reduce_partial_map.shape[0]:
        _refuse(_BOUNDS, f"reduce_indptr ends at {num_entries}, past the end of reduce_partial_map")
    split = item_counts > 1
    wrong_count = reduce_indptr.diff() != torch.where(split, item_counts, 0)
    _refuse_where(wrong_count, _MERGES, "merge entries that are not the parts of row")
    if plan.reduce_final_map.shape != (plan.rows, 2):
        _refuse(_MERGES, f"reduce_final_map has shape {tuple(plan.reduce_final_map.shape)}")
    rows = torch.arange(plan.rows)
    final_rows = torch.stack((rows, rows + 1), 1)
    wrong_rows = (plan.reduce_final_map.cpu() != final_rows).any(1)
    _refuse_where(split & wrong_rows, _MERGES, "a merge that writes other rows than row")
    entries = plan.reduce_partial_map[:num_entries].cpu().long()
    partial = items[split[items[:, 0]], 1]
    _refuse_where(entries != partial, _MERGES, "a partial row that its item does not write, at entry")
    outside = (entries < 0) | (entries >= plan.num_partial_rows)
    _refuse_where(outside, _BOUNDS, f"a partial row outside the {plan.num_partial_rows} provided, at entry")
    if bool((entries.sort().values.diff() == 0).any()):
        _refuse(_MERGES, "two items write the same partial row")
