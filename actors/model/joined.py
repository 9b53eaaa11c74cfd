"""Tensors in a row, as `torch.cat` makes them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat` for weights.

    Of the meta tensors by which a shard is measured torch's own makes a Python program that imports
    torch._dynamo, which takes seconds and leaves a folder in the temporary one.
    """
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    out = torch.empty(shape, dtype=parts[0].dtype, device=parts[0].device)
    for piece, part in zip(torch.split(out, [part.shape[dim] for part in parts], dim), parts, strict=True):
        piece.copy_(part)
    return out
