"""The matrix product of a layer, by the library that its size runs fastest in."""

import os
from pathlib import Path

import torch
from torch import Tensor


def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


ONEDNN_MIN_PRODUCTS = 1 << 62 if _is_intel() else 1 << 20
"""rows * in * out from which a float32 product goes to oneDNN instead of torch.mm (MKL).

Measured with one thread, us of (MKL, oneDNN). AMD EPYC, in 256, out 384: 1 row (16, 24), 8 (36, 29),
32 (95, 69), 128 (265, 133); out 6144: 4 rows (619, 302), 128 (4861, 2121). On Intel's own processors MKL is
never behind: Xeon with AVX-512, in 256, out 384: 1 row (5, 22), 8 (10, 28), 32 (37, 57), 128 (147, 190).
Ranks that compute the same must choose alike, so the processor's maker decides, not a trial.
"""
MAX_KERNELS = 256
"""oneDNN compiles a product anew for every number of rows; it would keep 1024 kernels of 0.5 to 2 MB.

A shard of the bundled model grew from 394 to 1250 MiB as its steps took new sizes. With 64 it stays below
560, but 32 requests with 3 drafts then run at three quarters of the speed (1002 tokens/s; 1415 with 256, 1351
with 1024; Intel Xeon, one thread): experts see many numbers of rows in one step.
"""
_CAPACITIES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Of oneDNN and of torch's wrapper around it: both hold the same kernels; read once, at first use."""


class MatrixProduct:
    """x [n, in] -> x W^T [n, out].

    W^T is kept contiguous: a product of one row reads it up to twice as fast as W.
    """

    __slots__ = ("_onednn", "_size", "_transposed", "_weight")

    def __init__(self, weight: Tensor) -> None:
        """weight [out, in], as checkpoints hold it; copied unless its transpose is contiguous."""
        self._transposed = weight.t().contiguous()
        self._weight = self._transposed.t()
        self._size = weight.numel()
        # bfloat16 goes to oneDNN by torch.mm itself, float64 has no kernel there.
        self._onednn = weight.dtype is torch.float32 and weight.device.type == "cpu" and torch._C._has_mkldnn
        if self._onednn:
            for name in _CAPACITIES:
                os.environ.setdefault(name, str(MAX_KERNELS))

    def __call__(self, x: Tensor) -> Tensor:
        x, rows = x.to(self._weight.dtype), x.shape[0]
        if self._onednn and rows > 1 and rows * self._size >= ONEDNN_MIN_PRODUCTS:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return product
        return x @ self._transposed
