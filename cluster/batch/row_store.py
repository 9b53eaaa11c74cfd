"""Finished output rows on disk, in the order in which they were finished; memory holds where they lie."""

import os
import zlib
from array import array
from collections.abc import Iterator

from cluster.batch.rows import KEY_BYTES
from kernels_integration.errors import UnavailableError


class RowStore:
    """Rows by number, counted from 0. About 50 bytes of memory a row.

    A row is kept as a line: UTF-8, a newline behind it. `descriptor` is owned from now on, and is read and
    written here alone; where: what to call the file in messages.
    """

    def __init__(self, descriptor: int, where: str) -> None:
        self._descriptor = descriptor
        self._where = where
        self._end = 0
        self._starts = array("Q")
        self._sizes = array("Q")
        self._keys = bytearray()
        self._failed = bytearray()

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def end(self) -> int:
        """Bytes of the file that belong to rows."""
        return self._end

    def append(self, row: str, *, key: bytes, failed: bool) -> tuple[int, int, int]:
        """Returns the row's start and size in the file, and the checksum of its bytes.

        A row is there whole or not at all. Errors: UnavailableError when the system takes no more.
        """
        # A lone surrogate stands inside a JSON string, where \udXXX is its own escape.
        data = (row + "\n").encode(errors="backslashreplace")
        start = self._end
        try:
            write_whole(self._descriptor, data, start)
        except OSError as error:
            raise UnavailableError(f"{self._where} takes no more: {error.strerror}") from error
        self.note(start, len(data), key=key, failed=failed)
        return start, len(data), zlib.crc32(data)

    def note(self, start: int, size: int, *, key: bytes, failed: bool) -> int:
        """Count a row that the file has already. Returns its number."""
        assert len(key) == KEY_BYTES
        self._starts.append(start)
        self._sizes.append(size)
        self._keys += key
        self._failed.append(failed)
        self._end = max(self._end, start + size)
        return len(self._starts) - 1

    def holds(self, start: int, size: int, checksum: int) -> bool:
        """Whether the file has these very bytes there."""
        data = os.pread(self._descriptor, size, start)
        return len(data) == size and zlib.crc32(data) == checksum

    def row(self, number: int) -> bytes:
        """The line. Errors: UnavailableError."""
        try:
            data = os.pread(self._descriptor, self._sizes[number], self._starts[number])
        except OSError as error:
            raise UnavailableError(f"{self._where} cannot be read: {error.strerror}") from error
        if len(data) != self._sizes[number]:
            raise UnavailableError(f"{self._where} has been cut while it was in use")
        return data

    def key(self, number: int) -> bytes:
        return bytes(self._keys[number * KEY_BYTES : (number + 1) * KEY_BYTES])

    def failed(self, number: int) -> bool:
        return bool(self._failed[number])

    def numbers_failed(self) -> Iterator[int]:
        return (number for number, failed in enumerate(self._failed) if failed)

    def trim(self) -> None:
        """Cut off what is behind the last row: the beginning of one that was never finished."""
        os.ftruncate(self._descriptor, self._end)

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def write_whole(descriptor: int, data: bytes, start: int) -> None:
    """Write at an offset; what cannot be written whole is not there. Errors: OSError."""
    rest, at = memoryview(data), start
    try:
        while rest:
            written = os.pwrite(descriptor, rest, at)
            rest, at = rest[written:], at + written
    except BaseException:
        os.ftruncate(descriptor, start)
        raise
