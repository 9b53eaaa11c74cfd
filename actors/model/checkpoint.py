"""A checkpoint directory: names and shapes from the headers of its safetensors, values slice by slice.

Only files that end in .safetensors are ever opened: nothing in a checkpoint can be executed.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from actors.model.checkpoint_check import find_problems
from actors.model.checkpoint_files import CheckpointFiles
from actors.model.dequantize import dequantize
from actors.model.quantization import DEFAULT_BLOCK_SIZE, SCALE_SUFFIX
from actors.model.safetensors_file import TensorInfo
from kernels_integration.errors import CheckpointError

TILE_BYTES = 1 << 20
"""Stored bytes that are converted at a time; they and their float32 values stay in a core's cache."""
_MAX_SKIPPED_BYTES = 1 << 14
"""Between the columns of two rows, up to which reading through is cheaper than another call."""
_MAX_LISTED = 100

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}


class Checkpoint:
    """An open checkpoint. Use it as a context manager: the files stay open until it closes.

    Stacked experts appear under the released name of each expert. What is wrong with the files is collected
    in `problems` for `check` to raise; `notes` tell of what is odd but legal.
    """

    def __init__(self, path: str | Path, block_size: tuple[int, int] = DEFAULT_BLOCK_SIZE) -> None:
        """block_size: rows and columns of an FP8 weight that share a scale."""
        self.path = Path(path)
        self.block_size = block_size
        self.on_read: Callable[[int], None] = lambda num_bytes: None
        """Called with the bytes of a slice, tile by tile, as they have been read."""
        self._files = CheckpointFiles(self.path)
        self._staging = torch.empty(0, dtype=torch.uint8)

    @property
    def problems(self) -> list[str]:
        return self._files.problems

    @property
    def notes(self) -> list[str]:
        return self._files.notes

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What the files hold, by released name."""
        return self._files.tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __getitem__(self, name: str) -> TensorInfo:
        return self.tensors[name]

    def find_problems(
        self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]
    ) -> list[str]:
        """One line for all that is wrong with the files, and with the tensors that a model expects.

        Tensors that are missing, unexpected, of a wrong shape, of a dtype that cannot be read.
        """
        return self.problems + find_problems(self._files, required, optional, self.block_size)

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Errors: CheckpointError that lists what `find_problems` finds."""
        problems = self.find_problems(required, optional)
        if problems:
            lines = [f"  {p}" for p in problems[:_MAX_LISTED]]
            if len(problems) > _MAX_LISTED:
                lines.append(
                    f"  and {len(problems) - _MAX_LISTED} more; `latentray inspect {self.path}` lists them"
                )
            raise CheckpointError(
                f"{self.path}: the weights cannot be loaded as config.json describes them "
                f"({len(problems)} problem{'s' if len(problems) > 1 else ''}):\n" + "\n".join(lines)
            )

    def read(
        self,
        name: str,
        rows: slice = slice(None),
        columns: slice = slice(None),
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """The named slice in `dtype` (default: as stored); FP8 is dequantised, into float32 by default.

        Memory beyond the result: a tile. Errors: CheckpointError when a value is NaN, infinite or too large
        for the dtype.
        """
        info = self.tensors[name]
        stored = _TORCH_DTYPES[info.dtype]
        is_quantized = f"{name}{SCALE_SUFFIX}" in self.tensors
        if dtype is None:
            dtype = torch.float32 if is_quantized else stored
        row_range = range(*rows.indices(info.shape[0]))
        column_range = range(*columns.indices(_width(info)))
        out = self.allocate((len(row_range), len(column_range)), dtype)
        self.fill(name, row_range, column_range, out)
        return out if len(info.shape) > 1 else out[:, 0]

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Memory for what is read; `fill` itself writes to the CPU's."""
        return torch.empty(shape, dtype=dtype, device=device)

    def fills(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def find_bad_values(self, name: str) -> str | None:
        """Read a whole tensor, tile by tile; what is wrong with its values, None if nothing."""
        info = self.tensors[name]
        tile = torch.empty(_tile_rows(info, _width(info)), _width(info), dtype=torch.float32)
        try:
            for start in range(0, info.shape[0], len(tile)):
                rows = range(start, min(start + len(tile), info.shape[0]))
                self.fill(name, rows, range(_width(info)), tile[: len(rows)])
        except CheckpointError as error:
            return str(error)
        return None

    def fill(self, name: str, rows: range, columns: range, out: Tensor) -> None:
        """Write the slice into out [rows, columns], in its dtype and layout: contiguous, or its transpose is.

        A vector counts as one column. FP8 is dequantised unless out is FP8. Errors: as in `read`.
        """
        if not rows or not columns:
            return
        info = self.tensors[name]
        stored = _TORCH_DTYPES[info.dtype]
        scale_name = f"{name}{SCALE_SUFFIX}"
        is_dequantised = scale_name in self.tensors and out.dtype is not stored
        scale = self.read(scale_name, dtype=torch.float32) if is_dequantised else None
        is_direct = scale is None and out.dtype is stored and len(columns) == _width(info)
        is_direct = is_direct and out.is_contiguous()
        step = _tile_rows(info, _width(info) if _reads_through(info, columns) else len(columns))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            target = out[start : start + len(part)]
            if is_direct:
                self._read_rows(info, part, columns, target.view(torch.uint8))
                values = target
            else:
                raw = self._read_tile(info, part, columns)
                if scale is None:
                    values = raw.view(stored).to(out.dtype)
                else:
                    values = self._dequantize(raw, scale, part, columns, out.dtype).to(out.dtype)
                _store(values, target)
            self.on_read(len(part) * len(columns) * stored.itemsize)
            self._require_finite(name, info, values)

    def _dequantize(
        self, raw: Tensor, scale: Tensor, rows: range, columns: range, dtype: torch.dtype
    ) -> Tensor:
        return dequantize(
            raw,
            scale,
            first_row=rows.start,
            first_column=columns.start,
            block_size=self.block_size,
            exact=dtype is torch.float64,
        )

    def _read_tile(self, info: TensorInfo, rows: range, columns: range) -> Tensor:
        """Stored bytes of a part, [rows, columns * itemsize] uint8 contiguous, valid until the next call."""
        item = _TORCH_DTYPES[info.dtype].itemsize
        if not _reads_through(info, columns):
            return self._read_rows(info, rows, columns, self._stage(len(rows), len(columns) * item))
        raw = self._stage(len(rows), _width(info) * item)
        self._read_rows(info, rows, range(_width(info)), raw)
        return raw[:, columns.start * item : columns.stop * item].contiguous()

    def _read_rows(self, info: TensorInfo, rows: range, columns: range, raw: Tensor) -> Tensor:
        """Fill raw, as many contiguous bytes as the part takes: at once where it is whole rows."""
        item = _TORCH_DTYPES[info.dtype].itemsize
        pitch, length = _width(info) * item, len(columns) * item
        first = info.offset + rows.start * pitch + columns.start * item
        file, buffer = self._files[info.file], raw.numpy().data.cast("B")
        if length == pitch:
            file.read_into(buffer, first)
        else:
            for row in range(len(rows)):
                file.read_into(buffer[row * length : (row + 1) * length], first + row * pitch)
        return raw

    def _stage(self, height: int, width: int) -> Tensor:
        if self._staging.numel() < height * width:
            self._staging = torch.empty(height * width, dtype=torch.uint8)
        return self._staging[: height * width].view(height, width)

    def _require_finite(self, name: str, info: TensorInfo, values: Tensor) -> None:
        if values.dtype is torch.float8_e4m3fn:  # no minimum is defined for it
            values = values.float()
        # NaN is the least and the greatest wherever it occurs; one pass without temporaries.
        least, greatest = torch.aminmax(values)
        if bool(torch.isfinite(least)) and bool(torch.isfinite(greatest)):
            return
        raise CheckpointError(
            f"{self.path / info.file}: tensor {name} holds NaN or infinite values (or larger ones than "
            f"{str(values.dtype).removeprefix('torch.')} holds); weights must be finite. Download the "
            "checkpoint again or repair its conversion"
        )


def _store(values: Tensor, target: Tensor) -> None:
    if target.is_contiguous():
        target.copy_(values)
    else:  # turned in the cache, so that both long copies run along memory
        target.t().copy_(values.t().contiguous())


def _width(info: TensorInfo) -> int:
    return info.shape[1] if len(info.shape) > 1 else 1


def _tile_rows(info: TensorInfo, num_columns: int) -> int:
    return max(1, TILE_BYTES // (num_columns * _TORCH_DTYPES[info.dtype].itemsize))


def _reads_through(info: TensorInfo, columns: range) -> bool:
    """Whether whole rows are read for a part of their columns."""
    skipped = _width(info) - len(columns)
    return skipped * _TORCH_DTYPES[info.dtype].itemsize <= _MAX_SKIPPED_BYTES
