"""Safetensors of a checkpoint directory: names and shapes from the headers, data slice by slice.

Only files that end in .safetensors are ever opened: nothing in a checkpoint can be executed.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels_integration.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
READABLE_DTYPES = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a safetensors header tells of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it: BF16, F16, F32, F8_E4M3..."""
    file: str


class Checkpoint:
    """An open checkpoint. Use it as a context manager: the files stay mapped until it closes.

    With an index file the index says which file holds a tensor; without one, all *.safetensors do.

    Errors: CheckpointError: no safetensors, an index that is not JSON or names files or tensors that do not
    exist, a file that is truncated or not safetensors, a tensor in two files.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._infos: dict[str, TensorInfo] = {}
        try:
            index = self._read_index()
            for file in sorted(set(index.values())) if index is not None else self._list_files():
                self._open(file, index)
            absent = sorted(set(index or {}) - set(self._infos))
            if absent:
                raise CheckpointError(
                    f"{self.path / INDEX_FILE} names tensors that its files lack; download them again:\n"
                    + "\n".join(f"  {name}" for name in absent)
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._handles.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __getitem__(self, name: str) -> TensorInfo:
        return self._infos[name]

    def check(self, required: Mapping[str, tuple[int, ...]], optional: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the tensors with the names and shapes that a model expects.

        Errors: CheckpointError that lists every missing, unexpected, wrongly shaped and unreadable tensor.
        """
        expected = {**optional, **required}
        problems = [
            f"missing     {name}, shape {list(shape)}" for name, shape in required.items() if name not in self
        ]
        for name, info in self._infos.items():
            if name not in expected:
                problems.append(f"unexpected  {name}, shape {list(info.shape)} in {info.file}")
                continue
            if info.shape != expected[name]:
                problems.append(
                    f"wrong shape {name}: {list(info.shape)} in {info.file}, must be {list(expected[name])}"
                )
            if info.dtype not in READABLE_DTYPES:
                legal = ", ".join(READABLE_DTYPES)
                problems.append(f"wrong dtype {name}: {info.dtype} in {info.file}, must be one of {legal}")
        if problems:
            raise CheckpointError(
                f"{self.path}: tensors do not fit config.json ({len(problems)} problems):\n"
                + "\n".join(f"  {p}" for p in problems)
            )

    def read(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """The named slice as stored; only its bytes are copied out of the file.

        Errors: CheckpointError when a value of the slice is NaN or infinite.
        """
        info = self._infos[name]
        part = self._handles[info.file].get_slice(name)
        data: Tensor = part[rows] if len(info.shape) == 1 else part[rows, columns]
        if not bool(torch.isfinite(data).all()):
            raise CheckpointError(
                f"{self.path / info.file}: tensor {name} holds NaN or infinite values; weights must be "
                "finite. Download the checkpoint again or repair its conversion"
            )
        return data

    def _list_files(self) -> list[str]:
        files = sorted(f for f in os.listdir(self.path) if f.endswith(".safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.path} holds no *.safetensors; only safetensors checkpoints are read, pickle files "
                "(*.bin, *.pt, *.pth) never are: convert the checkpoint to safetensors"
            )
        return files

    def _read_index(self) -> dict[str, str] | None:
        file = self.path / INDEX_FILE
        if not file.exists():
            return None
        try:
            index = dict(json.loads(file.read_bytes())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} cannot be read as a safetensors index: {error!r}") from None
        for name, at in index.items():
            if not isinstance(at, str) or os.path.basename(at) != at or not at.endswith(".safetensors"):
                raise CheckpointError(
                    f"{file} says that tensor {name} is in {at!r}; it must be a *.safetensors file beside it"
                )
        absent = sorted({at for at in index.values() if not (self.path / at).is_file()})
        if absent:
            raise CheckpointError(
                f"{self.path} lacks files that {INDEX_FILE} names: {', '.join(absent)}; download them again"
            )
        return index

    def _open(self, file: str, index: Mapping[str, str] | None) -> None:
        try:
            handle = self._stack.enter_context(safe_open(self.path / file, framework="pt"))
            for name in handle.keys():  # noqa: SIM118 - not a dict
                if index is not None and index.get(name) != file:
                    continue
                if name in self._infos:
                    raise CheckpointError(
                        f"tensor {name} is in {self._infos[name].file} and in {file} of {self.path}; "
                        f"keep one, or add {INDEX_FILE}"
                    )
                header = handle.get_slice(name)
                self._infos[name] = TensorInfo(
                    shape=tuple(header.get_shape()), dtype=header.get_dtype(), file=file
                )
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path / file} is truncated or not a safetensors file ({error}); download it again"
            ) from None
        self._handles[file] = handle
