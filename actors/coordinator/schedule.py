"""A chosen step, and what steps that have not reported may still do to a request."""

from collections.abc import Iterable
from typing import NamedTuple

from actors.coordinator.request_state import RequestState
from actors.messages import RowKind

UNKNOWN_START = -1
"""Position of a verify whose request has a step in flight: only the shards know it."""


class ScheduledRows(NamedTuple):
    """The rows of one request in one step."""

    request: RequestState
    admission: int
    kind: RowKind
    k: int
    start: int
    """Position of the first row, or UNKNOWN_START."""
    num_rows: int
    readonly: int
    """Leading rows that are computed again from cached KV and do not write; none but after a prefix hit."""
    new_blocks: list[int]


class Schedule(NamedTuple):
    """One step. Never empty."""

    verifies: list[ScheduledRows]
    """By k, descending."""
    chunks: list[ScheduledRows]
    admitted: list[RequestState]


class InFlight(NamedTuple):
    """What the outstanding steps of one admission add up to, once they have reported."""

    chunk_rows: int
    min_tokens: int
    """Committed at least: one per verify or final chunk."""
    max_tokens: int
    """Committed at most: k + 1 per verify, one per final chunk."""


NOTHING = InFlight(0, 0, 0)


def in_flight_by_admission(outstanding: Iterable[Schedule]) -> dict[int, InFlight]:
    """Derived from the outstanding steps each time, never stored: so nothing can be dropped wrongly."""
    sums: dict[int, InFlight] = {}
    of_verify: dict[int, InFlight] = {}
    for schedule in outstanding:
        for rows in schedule.verifies:
            k = rows.k
            alone = of_verify.get(k) or of_verify.setdefault(k, InFlight(0, 1, k + 1))
            _add(sums, rows.admission, alone)
        for rows in schedule.chunks:
            is_final = int(rows.kind is RowKind.FINAL_CHUNK)
            _add(sums, rows.admission, InFlight(rows.num_rows, is_final, is_final))
    return sums


def _add(sums: dict[int, InFlight], admission: int, more: InFlight) -> None:
    known = sums.get(admission)
    sums[admission] = more if known is None else InFlight(*map(sum, zip(known, more, strict=True)))
