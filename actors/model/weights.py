"""Placement: which slice of each tensor a tensor-parallel rank reads, in the dtype it computes with."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actors.model.checkpoint import Checkpoint


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What norms, router, softmax and logits are computed in: float32, or float64 in a float64 model."""
    return torch.float64 if dtype is torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReader:
    """Reads the tensors under `prefix` as rank `rank` of `size` needs them."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    rank: int
    size: int
    prefix: str = ""

    def under(self, prefix: str) -> "WeightReader":
        return replace(self, prefix=self.prefix + prefix)

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Replicated: every rank reads all of it."""
        return self.checkpoint.read(self.prefix + name).to(dtype or self.dtype)

    def norm(self, name: str) -> Tensor:
        """Whole, in the dtype that norms compute in."""
        return self.whole(name, accumulate_dtype(self.dtype))

    def rows(self, name: str) -> Tensor:
        """This rank's part of the output features; `size` divides them."""
        return self.checkpoint.read(self.prefix + name, rows=self._share(name, 0)).to(self.dtype)

    def columns(self, name: str) -> Tensor:
        """This rank's part of the input features; `size` divides them."""
        return self.checkpoint.read(self.prefix + name, columns=self._share(name, 1)).to(self.dtype)

    def vocabulary(self, name: str) -> Tensor:
        """This rank's ceil(V / size) rows; rows past the vocabulary are zero."""
        vocab_size, hidden_size = self.checkpoint[self.prefix + name].shape
        share = -(-vocab_size // self.size)
        start, end = min(self.rank * share, vocab_size), min((self.rank + 1) * share, vocab_size)
        padded = torch.zeros(share, hidden_size, dtype=self.dtype)
        if end > start:
            padded[: end - start] = self.checkpoint.read(self.prefix + name, rows=slice(start, end))
        return padded

    def _share(self, name: str, dim: int) -> slice:
        width = self.checkpoint[self.prefix + name].shape[dim] // self.size
        return slice(self.rank * width, (self.rank + 1) * width)
