"""What a rank would read and keep, counted without reading: the model is built over tensors without data."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.model.quantization import SCALE_SUFFIX
from actors.model.safetensors_file import ITEM_SIZES, TensorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardBytes:
    """Of one rank."""

    file_bytes: int
    """Read from files while loading, scales included."""
    weight_bytes: int
    """Kept in memory, in the dtypes that are computed with."""


class SliceMeter:
    """Answers like a Checkpoint of the given tensors, with tensors on the "meta" device; counts them.

    Tensors that `stored` lacks are counted as if they were stored as they are computed with.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, TensorInfo]) -> None:
        self.file_bytes = 0
        self.weight_bytes = 0
        self._shapes = shapes
        self._stored = stored

    def __getitem__(self, name: str) -> TensorInfo:
        return TensorInfo(shape=self._shapes[name], dtype="", file="", offset=0)

    def read(
        self,
        name: str,
        rows: slice = slice(None),
        columns: slice = slice(None),
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        shape = tuple(
            len(range(*part.indices(size)))
            for size, part in zip(self._shapes[name], (rows, columns), strict=False)
        )
        part = torch.empty(shape, dtype=dtype, device="meta")
        info = self._stored.get(name)
        if math.prod(shape):
            scale = self._stored.get(f"{name}{SCALE_SUFFIX}")
            self.file_bytes += scale.num_bytes if scale is not None else 0
        self.file_bytes += part.nbytes if info is None else part.numel() * ITEM_SIZES.get(info.dtype, 1)
        self.weight_bytes += part.nbytes
        return part
