"""The matrix product of a layer, with the weight in the layout that its dtype runs fastest in."""

import torch
from torch import Tensor


class Linear:
    """x [n, in] -> x W^T [n, out]; results differ between layouts by rounding only.

    float32 and bfloat16 on a CPU: packed for oneDNN. On an AMD CPU, one thread, out 384, in 256, a 32-row
    float32 product takes 48 us against 77 to 130 us of torch.mm (MKL), 128 rows 120 us against 250 us.
    Else: W^T contiguous, which a product of few rows reads up to twice as fast as W.
    """

    __slots__ = ("_packed", "_transposed")

    def __init__(self, weight: Tensor) -> None:
        """weight [out, in], as checkpoints hold it; not kept."""
        self._packed = _pack(weight) if _can_pack(weight) else None
        self._transposed = weight.t().contiguous() if self._packed is None else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
            return product
        assert self._transposed is not None
        return x @ self._transposed


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def _pack(weight: Tensor) -> Tensor:
    # No row count as a hint: a layout for 1 or for 128 rows is slower at the other end than the neutral one.
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed
