"""One plan per layer of a forward pass, with as little planning as the lengths allow."""

import torch
from torch import Tensor

from kernels_integration.plan import SparseMLAPlan, plan_from_indptr
from kernels_integration.rows import Selection


def plan_selection(selection: Selection, num_parts: int, like: SparseMLAPlan | None = None) -> SparseMLAPlan:
    """The plan of a selection over this rank's KV, with the split of `like` if it is of the same lengths.

    Lengths mostly stay the same between layers of a pass (in a DCP group of one). Never waits for a device:
    there, only lengths in the same tensor count as the same.
    """
    if like is not None and _known_equal(selection.kv_indptr, like.kv_indptr):
        return like.with_indices(selection.kv_indices)
    return plan_from_indptr(selection.kv_indptr, num_parts, kv_indices=selection.kv_indices)


def _known_equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.device.type == "cpu" and a.dtype == b.dtype and torch.equal(a, b))
