"""What a rank would read and keep, counted without reading: the model is built over tensors without data."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.model.quantization import DEFAULT_BLOCK_SIZE, SCALE_SUFFIX
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

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        stored: Mapping[str, TensorInfo],
        block_size: tuple[int, int] = DEFAULT_BLOCK_SIZE,
    ) -> None:
        self.block_size = block_size
        self.file_bytes = 0
        self.weight_bytes = 0
        self._shapes = shapes
        self._stored = stored

    def __getitem__(self, name: str) -> TensorInfo:
        if name in self._shapes:
            return TensorInfo(shape=self._shapes[name], dtype="", file="", offset=0)
        return self._stored[name]  # scales

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        data = torch.empty(shape, dtype=dtype, device="meta")
        self.weight_bytes += data.nbytes
        return data

    def fills(self, device: torch.device) -> bool:
        return True

    def fill(self, name: str, rows: range, columns: range, out: Tensor) -> None:
        num_values = len(rows) * len(columns)
        info, scale = self._stored.get(name), self._stored.get(f"{name}{SCALE_SUFFIX}")
        if num_values and scale is not None and out.dtype is not torch.float8_e4m3fn:
            self.file_bytes += scale.num_bytes
        self.file_bytes += num_values * (ITEM_SIZES.get(info.dtype, 1) if info else out.itemsize)
