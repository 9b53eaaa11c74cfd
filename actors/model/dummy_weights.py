"""Random weights in the shapes of a config, made on the device: for measurements without a checkpoint."""

from collections.abc import Callable, Mapping
from zlib import crc32

import torch
from torch import Tensor

from actors.model.safetensors_file import TensorInfo

DEVIATION = 0.02


class DummyWeights:
    """Answers like a Checkpoint that holds these tensors: norms 1, biases 0, the rest normal(0, 0.02).

    A slice is random by its name and where it begins, so ranks that read the same slice get the same values.
    Slices of one tensor that overlap need not agree.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], block_size: tuple[int, int]) -> None:
        self.block_size = block_size
        self.on_read: Callable[[int], None] = lambda num_bytes: None
        """Called with the bytes of a slice that has been made."""
        self._shapes = shapes

    def __getitem__(self, name: str) -> TensorInfo:
        return TensorInfo(shape=self._shapes[name], dtype="", file="", offset=0)

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def fills(self, device: torch.device) -> bool:
        return True

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def fill(self, name: str, rows: range, columns: range, out: Tensor) -> None:
        """As `Checkpoint.fill`, on any device."""
        if name.endswith("bias"):
            out.zero_()
        elif len(self._shapes[name]) == 1:
            out.fill_(1.0)
        else:
            seed = crc32(f"{name} {rows.start} {columns.start}".encode())
            out.normal_(std=DEVIATION, generator=torch.Generator(out.device).manual_seed(seed))
        self.on_read(out.nbytes)
