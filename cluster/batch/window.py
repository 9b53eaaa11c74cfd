"""In which order rows are asked for: those with a common beginning together, long work first.

Only rows that were read are ordered, and only so many are read ahead: an input of any length is answered in
the memory of two windows, and no row waits for more than a window of others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Generic, Protocol, TypeVar

from actors.requests import Request

MAX_ROWS = 1024
MAX_BYTES = 32 * 2**20
READ_PER_ROW = 2
"""Rows read for each one that is handed out: the reading goes on beside the answering, and windows grow."""


class Waiting(Protocol):
    @property
    def request(self) -> Request:
        """The one that tells what the row is like."""
        ...

    @property
    def num_bytes(self) -> int:
        """Of the row as it was read."""
        ...


Row = TypeVar("Row", bound=Waiting)


def in_windows(rows: Iterator[Row], *, num_first: int) -> Iterator[Row]:
    """All rows, ordered inside windows. num_first: rows of the first window, which the engine waits for."""
    upcoming = _Window[Row](list(islice(rows, num_first)))
    while current := arranged(upcoming.rows):
        upcoming = _Window[Row]([])
        for row in current:
            upcoming.fill(rows, READ_PER_ROW)
            yield row
        if not upcoming.rows:
            upcoming.fill(rows, num_first)


def arranged(rows: list[Row], *, prefix_tokens: int = 32) -> list[Row]:
    """Groups that share `prefix_tokens`, the one with the longest row first; inside a group by prompt.

    What is long should not begin last, when it would run alone. Rows of one beginning follow each other, the
    longest common ones most closely, so that the first one's KV blocks are still there for the others.
    """

    def beginning(row: Row) -> tuple[str, tuple[int, ...]]:
        return row.request.cache_salt or "", row.request.prompt_token_ids[:prefix_tokens]

    groups = [
        sorted(group, key=lambda row: row.request.prompt_token_ids)
        for _, group in groupby(sorted(rows, key=beginning), key=beginning)
    ]
    groups.sort(key=lambda group: max(map(num_tokens, group)), reverse=True)
    return [row for group in groups for row in group]


def num_tokens(row: Waiting) -> int:
    """Most tokens of prompt and completion together."""
    return len(row.request.prompt_token_ids) + (row.request.params.max_tokens or 0)


@dataclass(slots=True)
class _Window(Generic[Row]):
    rows: list[Row]
    num_bytes: int = 0

    def fill(self, source: Iterator[Row], num_rows: int) -> None:
        """Read so many rows, as far as there is room."""
        for _ in range(num_rows):
            if len(self.rows) >= MAX_ROWS or self.num_bytes >= MAX_BYTES:
                return
            if (row := next(source, None)) is None:
                return
            self.rows.append(row)
            self.num_bytes += row.num_bytes
