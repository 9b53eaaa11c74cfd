"""Whether a plan fits the tensors that it is run on, and whether it is a plan at all.

The validator checks every invariant of contracts/plan.md that a single plan can show.
"""

from typing import NoReturn

import torch
from torch import Tensor

from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan, WorkSplit
from kernels_integration.rows import Selection


def check_fit(plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor) -> Tensor:
    """The plan's indices, if the plan fits the tensors of an attention call; the door of every backend.

    Compares host integers only. Errors: PlanError.
    """
    if plan.kv_indices is None:
        raise PlanError("the plan is a split without kv_indices; give it the layer's with with_indices()")
    if plan.kv_indices.shape[0] < plan.kv_bound:
        raise PlanError(
            f"kv_indices of {plan.kv_indices.shape[0]} entries for a plan of {plan.kv_bound} KV tokens: "
            "every planned token needs its slot"
        )
    if not plan.rows <= q.shape[0] == o.shape[0] == lse.shape[0]:
        raise PlanError(
            f"plan of {plan.rows} rows for q of {q.shape[0]}, o of {o.shape[0]} and lse of {lse.shape[0]}: "
            "rows(plan) <= rows(q) == rows(o) == rows(lse); plan over real rows only"
        )
    if q.shape[1] != o.shape[1] or q.shape[1] != lse.shape[1]:
        raise PlanError(
            f"q of {q.shape[1]} heads with o of {o.shape[1]} and lse of {lse.shape[1]}: "
            "give all three the same heads"
        )
    if q.shape[2] != kv.dim or o.shape[2] > kv.dim:
        raise PlanError(
            f"q of width {q.shape[2]}, kv of {kv.dim} and o of {o.shape[2]}: "
            "q and kv hold C + R entries per token, o the first C"
        )
    accumulate = torch.float64 if q.dtype == torch.float64 else torch.float32
    if lse.dtype != accumulate:
        raise PlanError(f"lse of {lse.dtype} for q of {q.dtype}: lse must be {accumulate}")
    return plan.kv_indices


def validate_plan(plan: SparseMLAPlan, *, num_slots: int | None = None) -> None:
    """Checks all that a single plan can show of the invariants, for tests and debug runs.

    num_slots: size of the cache that kv_indices must stay inside. Reads device arrays on the host.
    Errors: PlanError that names the broken invariant.
    """
    row_kv = _checked_indptr("kv_indptr", plan.kv_indptr, plan.rows)
    if plan.kv_indices is not None:
        _check_indices(plan.kv_indices, int(row_kv[-1]), num_slots)
    if row_kv[-1] > plan.kv_bound:
        _refuse(_BOUNDS, f"kv_indptr ends at {row_kv[-1]}, past the kv_bound {plan.kv_bound}")
    if plan.split is not None:
        _check_split(plan.split, plan.rows, row_kv)


def _check_split(split: WorkSplit, rows: int, row_kv: Tensor) -> None:
    work_indptr = _checked_indptr("work_indptr", split.work_indptr, split.num_parts)
    if work_indptr[-1] > split.work_info.shape[0]:
        _refuse(
            _BOUNDS, f"work_indptr ends at {work_indptr[-1]}, work_info has {split.work_info.shape[0]} items"
        )
    items = split.work_info[: int(work_indptr[-1])].cpu().long()
    _check_bounds(items, rows, int(row_kv[-1]))
    # Rows may be spread over workers in any order; the items of one row keep theirs.
    items = items[items[:, 0].argsort(stable=True)]
    item_counts = items[:, 0].bincount(minlength=rows)
    _check_empty_rows(items, item_counts, row_kv)
    _check_query_rows(items, item_counts)
    _check_kv_tiling(items, row_kv)
    _check_merges(split, rows, items, item_counts)


def require_seen(selection: Selection, visible: Selection) -> None:
    """Invariant 8: each slot of a row is among the `visible` ones of that row, and is there once."""
    row_slots, seen = _row_and_slot(selection), _row_and_slot(visible)
    # One number for a row and a slot: the pair's place in a table of all.
    width = int(torch.cat((row_slots, seen))[:, 1].max()) + 1 if row_slots.shape[0] else 1
    wanted, allowed = (pairs[:, 0] * width + pairs[:, 1] for pairs in (row_slots, seen))
    for bad, what in (
        (~torch.isin(wanted, allowed), "a slot that its row may not see, at row"),
        (wanted.sort().values.diff(append=wanted.new_full((1,), -1)) == 0, "a slot twice, near row"),
    ):
        if bool(bad.any()):
            _refuse(_SEEN, f"{what} {int(row_slots[int(bad.int().argmax()), 0])}", _SELECT)


def require_owned(totals: Tensor, expected: Tensor) -> None:
    """Invariant 7: totals [rows], the ranks' tokens of each row together, are min(visible, index_topk)."""
    wrong = totals.cpu() != expected.cpu()
    if bool(wrong.any()):
        row = int(wrong.int().argmax())
        _refuse(_OWNED, f"{int(totals[row])} tokens instead of {int(expected[row])} in row {row}", _SELECT)


def _row_and_slot(selection: Selection) -> Tensor:
    """[n, 2] int64"""
    counts = selection.kv_indptr.cpu().long().diff()
    row = torch.repeat_interleave(counts)
    return torch.stack((row, selection.kv_indices[: row.shape[0]].cpu().long()), 1)


_TILING = "1 (the items of a row tile its KV exactly once, in order)"
_QUERY_ROWS = "2 (every planned row is written exactly once, directly or by the merge)"
_MERGES = "3 (one merge tile of 2 or more disjoint partial rows per split row, none for others)"
_BOUNDS = "4 (no item, index or pointer reaches past the planned rows and their KV)"
_EMPTY_ROWS = "5 (a row without KV has exactly one empty item, other rows none)"
_OWNED = "7 (the ranks' parts of a row are min(visible, index_topk) tokens together)"
_SELECT = "select among what the row sees on this rank"
_SEEN = "8 (every slot of a row is one that the row may see, once)"


def _refuse(invariant: str, what: str, fix: str = "build a plan for these rows and lengths") -> NoReturn:
    raise PlanError(f"plan breaks invariant {invariant}: {what}; {fix}")


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


def _check_merges(split: WorkSplit, rows: int, items: Tensor, item_counts: Tensor) -> None:
    reduce_indptr = _checked_indptr("reduce_indptr", split.reduce_indptr, rows)
    num_entries = int(reduce_indptr[-1])
    if num_entries > split.reduce_partial_map.shape[0]:
        _refuse(_BOUNDS, f"reduce_indptr ends at {num_entries}, past the end of reduce_partial_map")
    is_split = item_counts > 1
    wrong_count = reduce_indptr.diff() != torch.where(is_split, item_counts, 0)
    _refuse_where(wrong_count, _MERGES, "merge entries that are not the parts of row")
    if split.reduce_final_map.shape != (rows, 2):
        _refuse(_MERGES, f"reduce_final_map has shape {tuple(split.reduce_final_map.shape)}")
    row = torch.arange(rows)
    final_rows = torch.stack((row, row + 1), 1)
    wrong_rows = (split.reduce_final_map.cpu() != final_rows).any(1)
    _refuse_where(is_split & wrong_rows, _MERGES, "a merge that writes other rows than row")
    entries = split.reduce_partial_map[:num_entries].cpu().long()
    partial = items[is_split[items[:, 0]], 1]
    _refuse_where(entries != partial, _MERGES, "a partial row that its item does not write, at entry")
    outside = (entries < 0) | (entries >= split.num_partial_rows)
    _refuse_where(outside, _BOUNDS, f"a partial row outside the {split.num_partial_rows} provided, at entry")
    if bool((entries.sort().values.diff() == 0).any()):
        _refuse(_MERGES, "two items write the same partial row")
