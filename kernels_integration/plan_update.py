"""The next plan of a dense decode without planning: work items grow and slide.

Rows keep their items and workers keep their rows; only the positions in kv_indices move. The work of a plan
that is updated many times drifts from even: build one anew now and then.
Source: aiter's decode_update_mla_metadata_v1; contracts/plan.md, "Incremental update".
"""

from dataclasses import replace

import torch
from torch import Tensor

from kernels_integration.errors import PlanError
from kernels_integration.plan import SparseMLAPlan, WorkSplit
from kernels_integration.rows import Selection

_REBUILD = "build a plan for these lengths"


def update_plan(
    plan: SparseMLAPlan,
    selection: Selection,
    rejected: Tensor,
    *,
    max_visible: int,
    index_topk: int | None,
    dcp_size: int,
) -> SparseMLAPlan:
    """`plan` for the next step of the same rows in the same order, each longer by 1 - rejected [rows].

    selection: what the rows read now. max_visible: most tokens that any row sees now; index_topk: where
    sparse attention cuts, None: never. No row may have been without KV, nor lose all that its last item read.
    Never waits for a device, and there trusts that the lengths are so; on the host they are compared.

    Errors: PlanError where an update would be wrong: sparse rows, DCP, and on the host any row that has
    not grown so or whose last item would be empty.
    """
    rows = selection.kv_indptr.shape[0] - 1
    if dcp_size != 1:
        raise PlanError(
            f"a plan under DCP ({dcp_size} ranks) cannot be updated: its rows grow in turns; {_REBUILD}"
        )
    if index_topk is not None and max_visible > index_topk:
        raise PlanError(
            f"a plan of rows that see {max_visible} tokens cannot be updated: beyond index_topk {index_topk} "
            f"rows read another choice and no longer grow; {_REBUILD}"
        )
    if rows != plan.rows or rejected.shape != (rows,):
        raise PlanError(
            f"a plan of {plan.rows} rows cannot be updated to {rows} rows with {tuple(rejected.shape)} "
            f"numbers of rejected drafts: rows must be the same; {_REBUILD}"
        )
    growth = 1 - rejected.to(torch.int32)
    if plan.kv_indptr.device.type == "cpu":
        _require_growth(plan, selection, growth)
    kv_bound = plan.kv_bound + int(growth.sum()) if growth.device.type == "cpu" else len(selection.kv_indices)
    return replace(
        plan,
        kv_bound=kv_bound,
        kv_indptr=selection.kv_indptr.to(torch.int32),
        kv_indices=selection.kv_indices,
        split=None if plan.split is None else _slide(plan.split, growth),
    )


def _slide(split: WorkSplit, growth: Tensor) -> WorkSplit:
    """Items move by what the rows before theirs grew; a row's last item ends with it."""
    num_items = split.work_info.shape[0]
    before = growth.cumsum(0, dtype=torch.int32) - growth
    row, partial, qo_start, qo_end, kv_start, kv_end, kv_offset, zero = split.work_info.unbind(1)
    used = torch.arange(num_items, device=row.device) < split.work_indptr[-1]
    moved, grown = before[row] * used, growth[row] * used
    is_last = kv_offset == 0
    info = (
        row,
        partial,
        qo_start,
        qo_end,
        kv_start + moved,
        kv_end + moved + grown * is_last,
        kv_offset + grown * ~is_last,
        zero,
    )
    return replace(split, work_info=torch.stack(info, 1))


def _require_growth(plan: SparseMLAPlan, selection: Selection, growth: Tensor) -> None:
    old, new = plan.kv_indptr.diff(), selection.kv_indptr.diff()
    for bad, what in (
        (growth > 1, "a negative number of rejected drafts in row"),
        (old == 0, "no KV before in row"),
        (new != old + growth, "another length than one more, less what was rejected, in row"),
        (_last_item_lengths(plan) + growth < 1, "nothing left for the last item of row"),
    ):
        if bool(bad.any()):
            row = int(bad.int().argmax())
            raise PlanError(
                f"the plan cannot be updated: {what} {row} ({int(old[row])} tokens before, {int(new[row])} "
                f"now); {_REBUILD}"
            )


def _last_item_lengths(plan: SparseMLAPlan) -> Tensor:
    lengths = plan.kv_indptr.diff()
    if plan.split is None:
        return lengths
    items = plan.split.work_info[: int(plan.split.work_indptr[-1])]
    last = items[(items[:, 6] == 0) & (items[:, 5] > items[:, 4])]
    return lengths.index_copy(0, last[:, 0].long(), last[:, 5] - last[:, 4])
