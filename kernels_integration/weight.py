"""A matrix of a checkpoint as a backend gets it: numbers, or fp8 values with the scales of their blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """[..., out, in]. Backends choose how they keep and multiply it; leading dims are experts."""

    values: Tensor
    """In the dtype that is computed with, or float8_e4m3fn under `scales`."""
    scales: Tensor | None = None
    """[..., ceil(out / rows), ceil(in / columns)] float32: what the values of a block are multiplied by."""
    block_size: tuple[int, int] = (128, 128)
    """(rows, columns) that share a scale."""

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The numbers: value * scale, rounded to float32, then to dtype; exact in float64."""
        if self.scales is None:
            return self.values
        rows, columns = self.block_size
        scales = self.scales.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        height, width = self.values.shape[-2:]
        exact = accumulate_dtype(dtype)
        return (self.values.to(exact) * scales[..., :height, :width]).to(dtype)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What norms, router, softmax and logits are computed in: float32, or float64 in a float64 model."""
    return torch.float64 if dtype is torch.float64 else torch.float32
