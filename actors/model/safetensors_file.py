"""One safetensors file: its header, checked, and reads at an offset.

Files are read, not mapped: pages of a mapping would count as the process's memory, and a checkpoint is much
larger than what a rank keeps of it. Format: 8 bytes little-endian length of the header, the header as a JSON
object of name -> dtype, shape, data_offsets (counted from the end of the header), the data without holes.
"""

import json
import math
import os
import stat
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels_integration.errors import CheckpointError, shortened, shown

ITEM_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_MAX_NAME = 1024
"""Characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a header tells of one tensor; its values lie in row-major order from `offset` on."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors spells it: BF16, F16, F32, F8_E4M3..."""
    file: str
    offset: int
    """Of the first byte, in the file."""
    stored_as: str | None = None
    """The stacked tensor of which this is a part, under its name in the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES.get(self.dtype, 0)


class SafetensorsFile:
    """An open file. `problems` are those that leave its header readable, such as missing data.

    Errors: CheckpointError: no file, no permission, no safetensors header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[str] = []
        self.tensors: dict[str, TensorInfo] = {}
        try:
            # Without O_NONBLOCK, opening a pipe would wait for a writer.
            flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
            self._descriptor = os.open(path, os.O_RDONLY | flags)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        try:
            status = os.fstat(self._descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} cannot be read: it is no regular file")
            self._size = status.st_size
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer from the file's bytes at `offset`. Errors: CheckpointError: the file ends there."""
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from None
            if count == 0:
                raise self._broken("it has become shorter while it was read")
            buffer, offset = buffer[count:], offset + count

    def _broken(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is truncated or not a safetensors file ({why}); download it again"
        )

    def _read_header(self) -> None:
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if self._size < 8:
            raise self._broken(f"{self._size} bytes hold no header")
        if length > min(self._size - 8, _MAX_HEADER_BYTES):
            raise self._broken(f"its header of {length} bytes does not fit in {self._size}")
        text = bytearray(length)
        self.read_into(memoryview(text), 8)
        try:
            header = json.loads(text, object_pairs_hook=self._without_repetition)
            header.pop("__metadata__", None)
            for name, entry in header.items():
                for word in (name, entry["dtype"]):
                    _require_showable(word)
                start, end = entry["data_offsets"]
                info = TensorInfo(
                    shape=tuple(map(_count, entry["shape"])),
                    dtype=entry["dtype"],
                    file=self.path.name,
                    offset=8 + length + _count(start),
                )
                self.tensors[name] = info
                if info.dtype in ITEM_SIZES and _count(end) - start != info.num_bytes:
                    self.problems.append(
                        f"{self.path}: tensor {name}, {info.dtype} {list(info.shape)}, takes {end - start} "
                        f"bytes instead of {info.num_bytes}; convert or download the file again"
                    )
            extents = sorted(tuple(entry["data_offsets"]) for entry in header.values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._broken(f"its header cannot be parsed: {shown(error)}") from None
        self._check_extents(extents, self._size - 8 - length)

    def _without_repetition(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) != len(pairs):
            repeated = sorted(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
            self.problems += [
                f"{self.path}: the header names {shortened(name)} twice; convert the file again"
                for name in repeated
            ]
        return content

    def _check_extents(self, extents: list[tuple[int, int]], num_bytes: int) -> None:
        """Data must lie side by side and end where the file ends."""
        position = 0
        for start, end in extents:
            if start != position:
                self.problems.append(
                    f"{self.path}: the data of tensors overlaps or has holes at byte {min(start, position)}; "
                    "convert the file again"
                )
                return
            position = end
        if position > num_bytes:
            error = self._broken(f"{position - num_bytes} of {position} bytes of data are missing")
            self.problems.append(str(error))
        elif position < num_bytes:
            self.problems.append(
                f"{self.path}: {num_bytes - position} bytes follow the last tensor; download the file again"
            )


def _require_showable(word: object) -> None:
    """Messages quote it. Errors: ValueError."""
    if not isinstance(word, str) or len(word) > _MAX_NAME:
        raise ValueError(f"{shown(word)} is no name")
    word.encode()  # half of a surrogate pair is a ValueError


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{shown(value)} is no size")
    return value
