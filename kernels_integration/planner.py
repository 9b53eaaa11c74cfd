"""One plan per layer of a forward pass, with as little planning as the lengths allow."""

import torch
from torch import Tensor

from kernels_integration.plan import SparseMLAPlan, plan_from_indptr
from kernels_integration.selection import Selection


class StepPlanner:
    """Plans the attention of the layers of a step, one selection after another.

    reuse_split: the lengths are expected to stay the same between layers (a DCP group of one), so the
    work split is kept and a layer's plan is that split with its own indices; a selection with other
    lengths gets its own split all the same. A selection given again (layers that share an indexer's
    choice) gets its plan back. Never waits for a device: there, only lengths in the same tensor
    count as equal.
    """

    def __init__(self, num_parts: int, reuse_split: bool) -> None:
        self._num_parts = num_parts
        self._reuse_split = reuse_split
        self._last: tuple[Selection, SparseMLAPlan] | None = None

    def plan(self, selection: Selection) -> SparseMLAPlan:
        """The plan of a selection over this rank's KV. Errors: PlanError for num_parts < 1."""
        if self._last is not None:
            last_selection, last_plan = self._last
            if selection is last_selection:
                return last_plan
            if self._reuse_split and _known_equal(selection.kv_indptr, last_selection.kv_indptr):
                plan = last_plan.with_indices(selection.kv_indices)
                self._last = selection, plan
                return plan
        plan = plan_from_indptr(selection.kv_indptr, self._num_parts, kv_indices=selection.kv_indices)
        self._last = selection, plan
        return plan


def _known_equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.device.type == "cpu" and a.dtype == b.dtype and torch.equal(a, b))
