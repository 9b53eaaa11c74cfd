"""Placement: which slice of each tensor a tensor-parallel rank reads, in the dtype it computes with."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
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

    def unsplit(self) -> "WeightReader":
        """A reader whose rows and columns are all of them."""
        return replace(self, rank=0, size=1)

    def rows(self, name: str) -> Tensor:
        """This rank's part of the output features."""
        return self.checkpoint.read(self.prefix + name, rows=self._share(name, 0)).to(self.dtype)

    def columns(self, name: str) -> Tensor:
        """This rank's part of the input features."""
        return self.checkpoint.read(self.prefix + name, columns=self._share(name, 1)).to(self.dtype)

    def head_rows(self, name: str, num_heads: int) -> Tensor:
        """The output features of this rank's ceil(num_heads / size) heads; heads past the last are zero."""
        shape = self.checkpoint[self.prefix + name].shape
        start, end, padding = self._heads(shape[0], num_heads)
        data = self.checkpoint.read(self.prefix + name, rows=slice(start, end)).to(self.dtype)
        return F.pad(data, (0, 0, 0, padding)) if padding else data

    def head_columns(self, name: str, num_heads: int) -> Tensor:
        """The same of the input features."""
        shape = self.checkpoint[self.prefix + name].shape
        start, end, padding = self._heads(shape[1], num_heads)
        data = self.checkpoint.read(self.prefix + name, columns=slice(start, end)).to(self.dtype)
        return F.pad(data, (0, padding)) if padding else data

    def vocabulary(self, name: str) -> Tensor:
        """This rank's ceil(V / size) rows; rows past the vocabulary are zero."""
        return self.head_rows(name, self.checkpoint[self.prefix + name].shape[0])

    def _share(self, name: str, dim: int) -> slice:
        """Of widths that `size` does not divide, some ranks hold one more than others, or none."""
        width = self.checkpoint[self.prefix + name].shape[dim]
        return slice(width * self.rank // self.size, width * (self.rank + 1) // self.size)

    def _heads(self, width: int, num_heads: int) -> tuple[int, int, int]:
        """Start, end and missing features of this rank: every rank has equally many heads."""
        share = -(-num_heads // self.size) * (width // num_heads)
        start, end = min(self.rank * share, width), min((self.rank + 1) * share, width)
        return start, end, share - (end - start)
