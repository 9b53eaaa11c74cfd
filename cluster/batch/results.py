"""What becomes of finished rows: kept until they can stand in the order of the input."""

import tempfile
from array import array
from collections.abc import Callable, Iterator
from typing import Protocol

from cluster.batch.row_store import RowStore

_UNKNOWN = -1


class Results(Protocol):
    """Rows of an input by their place in it, counted from 0; each gets one output row, by add or by reuse."""

    def find(self, custom_id: str, key: bytes) -> int | None:
        """The output row that an earlier run has made for this very row, as a number for `reuse`."""
        ...

    def reuse(self, place: int, number: int) -> bool:
        """Returns whether it is a failed row."""
        ...

    def add(self, place: int, row: str, *, custom_id: str | None, key: bytes, failed: bool) -> None:
        """custom_id: None where none stands for the row: it cannot be found again.

        Errors: UnavailableError when the system takes no more.
        """
        ...


class RowOrder:
    """Which stored row stands at each place of the input. 8 bytes a row."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._num_known = 0

    def __len__(self) -> int:
        """Places that are known."""
        return self._num_known

    def put(self, place: int, number: int) -> None:
        if place >= len(self._numbers):
            self._numbers.extend([_UNKNOWN] * (place + 1 - len(self._numbers)))
        assert self._numbers[place] == _UNKNOWN, f"place {place} has its row"
        self._numbers[place] = number
        self._num_known += 1

    def numbers(self, start: int = 0) -> Iterator[int]:
        """The rows at start and behind it, up to the first place that is not known."""
        for place in range(start, len(self._numbers)):
            if self._numbers[place] == _UNKNOWN:
                return
            yield self._numbers[place]


class StreamedResults:
    """Output rows are handed on in the order of the input, as soon as those before them are there.

    Those that wait do so in a temporary file. write: gets each line; write_failed: those of failed rows, too.
    """

    def __init__(
        self, write: Callable[[bytes], None], write_failed: Callable[[bytes], None] = lambda line: None
    ) -> None:
        self._write = write
        self._write_failed = write_failed
        self._file = tempfile.TemporaryFile(prefix="latentray-batch-")  # noqa: SIM115 (closed by close)
        self._store = RowStore(self._file.fileno(), "the temporary folder")
        self._order = RowOrder()
        self._num_written = 0

    def find(self, custom_id: str, key: bytes) -> int | None:
        return None

    def reuse(self, place: int, number: int) -> bool:
        raise NotImplementedError("a stream has no rows of earlier runs")

    def add(self, place: int, row: str, *, custom_id: str | None, key: bytes, failed: bool) -> None:
        self._store.append(row, key=key, failed=failed)
        self._order.put(place, len(self._store) - 1)
        for number in self._order.numbers(self._num_written):
            line = self._store.row(number)
            self._write(line)
            self._num_written += 1
            if self._store.failed(number):
                self._write_failed(line)

    def close(self) -> None:
        self._file.close()
