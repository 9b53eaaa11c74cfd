"""Matrices in panels, as the kernels read them: TILE columns of W^T beside each other, row after row."""

import torch
from torch import Tensor

from kernels_integration.native.library import checked, library


def packed(weight: Tensor) -> Tensor:
    """[..., panels, in, tile] of weight [..., out, in], the last panel filled up with zeros."""
    tile = library().tile_columns()
    *experts, out, depth = weight.shape
    panels = -(-out // tile)
    if panels * tile != out:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, panels * tile - out))
    return weight.reshape(*experts, panels, tile, depth).mT.contiguous()


class PackedProduct:
    """x [n, in] -> x W^T [n, out]."""

    __slots__ = ("_call", "_columns", "_depth", "_is_bf16", "_panels")

    def __init__(self, weight: Tensor) -> None:
        """weight [out, in], float32 or bfloat16."""
        self._call = library().linear
        self._columns, self._depth = weight.shape
        self._is_bf16 = weight.dtype is torch.bfloat16
        self._panels = packed(weight)

    def __call__(self, x: Tensor) -> Tensor:
        if x.stride(1) != 1:
            x = x.contiguous()
        n, is_bf16 = x.shape[0], x.dtype is torch.bfloat16
        out = torch.empty(n, self._columns, dtype=x.dtype)
        checked(
            self._call,
            *(x.data_ptr(), is_bf16, x.stride(0), n, self._depth),
            *(self._panels.data_ptr(), self._is_bf16, self._columns),
            *(out.data_ptr(), is_bf16, torch.get_num_threads()),
        )
        return out


class PackedExperts:
    """Routed experts, each over the rows sent to it; sums in float32, in the order of the experts."""

    def __init__(self, gate_up: Tensor, down: Tensor, *, first_expert: int) -> None:
        """gate_up [E, 2I, hidden], down [E, hidden, I]."""
        self._call = library().experts
        self._first_expert = first_expert
        self._num_local, _, self._width = down.shape
        self._is_bf16 = down.dtype is torch.bfloat16
        self._gate_up, self._down = packed(gate_up), packed(down)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        x, experts, weights = x.contiguous(), experts.contiguous(), weights.contiguous()
        n, hidden = x.shape
        checked(
            self._call,
            *(x.data_ptr(), x.dtype is torch.bfloat16, hidden, n, hidden),
            *(experts.data_ptr(), weights.data_ptr(), experts.shape[1]),
            *(self._gate_up.data_ptr(), self._down.data_ptr(), self._is_bf16),
            *(self._width, self._first_expert, self._num_local),
            *(out.data_ptr(), out.stride(0), torch.get_num_threads()),
        )
        return out
