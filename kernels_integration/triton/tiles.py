"""What the launches of several kernels share."""

import torch
import triton

from kernels_integration.kv_formats import Fp8Format, StoredVectors

MIN_DOT = 16
"""The least M, N and K of a matrix product in a kernel."""


def dot_size(size: int) -> int:
    """The tile that holds `size` entries as one dimension of a product."""
    return max(MIN_DOT, int(triton.next_power_of_2(size)))


def dot_precision(dtype: torch.dtype) -> str:
    """Products of float32 in float32, not in the tensor cores' shorter format: it is the oracle's type."""
    return "ieee" if dtype == torch.float32 else "tf32"


def fp8_format(vectors: StoredVectors) -> Fp8Format | None:
    """The format of fp8 vectors; None: plain ones."""
    return vectors.format if isinstance(vectors.format, Fp8Format) else None
