"""--check-plans: a backend that validates every selection and plan, and guards the tensors of each attention.

It finds what a silent fault leaves behind: a row that reads another's KV or too little of its own, a write
past the planned rows, a row that nobody wrote. Reads devices on the host: nothing can be captured in a graph.
"""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import PlanError
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import SparseMLAPlan
from kernels_integration.plan_check import require_owned, require_seen, validate_plan
from kernels_integration.reference.rows import in_groups
from kernels_integration.reference.selection import select_visible
from kernels_integration.rows import Rows, Selection

if TYPE_CHECKING:
    from kernels_integration.backend import Backend

_GUARD_ROWS = 3
_SENTINEL = -1.5 * 2**15
"""Exact in every floating dtype but the 8-bit ones, and no result of attention."""


def checked(backend: "Backend") -> "Backend":
    """The backend with checks around selecting, planning and attending; everything else is its own."""
    return cast("Backend", _CheckedBackend(backend))


class _CheckedBackend:
    is_capturable = False

    def __init__(self, inner: "Backend") -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def select_visible(self, rows: Rows, dcp: DcpGroup) -> Selection:
        selection = self._inner.select_visible(rows, dcp)
        _check_selection(selection, rows, dcp, None)
        return selection

    def select_topk(
        self, q: Tensor, weights: Tensor, keys: StoredVectors, rows: Rows, topk: int, dcp: DcpGroup
    ) -> Selection:
        selection = self._inner.select_topk(q, weights, keys, rows, topk, dcp)
        _check_selection(selection, rows, dcp, topk)
        return selection

    def plan(self, selection: Selection, like: SparseMLAPlan | None = None) -> SparseMLAPlan:
        plan = self._inner.plan(selection, like)
        validate_plan(plan)
        if not torch.equal(plan.kv_indptr.long(), selection.kv_indptr.long()):
            row = int((plan.kv_indptr.diff() != selection.kv_indptr.diff()).int().argmax())
            raise PlanError(f"the plan has other lengths than its selection, first in row {row}")
        return plan

    def attend(
        self, plan: SparseMLAPlan, q: Tensor, kv: StoredVectors, o: Tensor, lse: Tensor, *, sm_scale: float
    ) -> None:
        """Runs on copies that end in guard rows, and copies what was written back."""
        validate_plan(plan, num_slots=kv.num_slots)
        rows = q.shape[0]
        guarded_q, guarded_o, guarded_lse = (
            torch.cat((t, t.new_full((_GUARD_ROWS, *t.shape[1:]), torch.nan))) for t in (q, o, lse)
        )
        outputs = (guarded_o.fill_(_SENTINEL), guarded_lse.fill_(_SENTINEL))
        self._inner.attend(
            plan, guarded_q[:rows], kv, guarded_o[:rows], guarded_lse[:rows], sm_scale=sm_scale
        )
        for name, output in zip(("o", "lse"), outputs, strict=True):
            is_left = (output == _SENTINEL).flatten(1).all(1)
            is_touched = (output != _SENTINEL).flatten(1).any(1)
            _refuse_row(is_left[: plan.rows], f"attention wrote no {name} of row")
            is_touched[: plan.rows] = False
            _refuse_row(is_touched, f"attention wrote {name} past the plan's {plan.rows} rows, at row")
        empty = plan.kv_indptr.diff() == 0
        is_wrong = guarded_o[: plan.rows].flatten(1).any(1) | (guarded_lse[: plan.rows] != -torch.inf).any(1)
        _refuse_row(empty & is_wrong, "attention gave something else than o = 0, lse = -inf to the empty row")
        o[: plan.rows] = guarded_o[: plan.rows]
        lse[: plan.rows] = guarded_lse[: plan.rows]


def _check_selection(selection: Selection, rows: Rows, dcp: DcpGroup, topk: int | None) -> None:
    visible = select_visible(in_groups(rows, dcp))
    require_seen(selection, visible)
    counts = selection.kv_indptr.diff()
    # Every rank checks alike: either all go on or the one that is wrong says so.
    totals = dcp.comm.all_reduce(counts.clone()) if dcp.size > 1 else counts
    seen = (rows.visible_to - rows.visible_from).clamp_min(0)
    require_owned(totals, seen if topk is None else seen.clamp_max(topk))


def _refuse_row(bad: Tensor, what: str) -> None:
    if bool(bad.any()):
        raise PlanError(f"{what} {int(bad.int().argmax())}")
