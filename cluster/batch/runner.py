"""Rows through an engine, a bounded number at a time, answers in the order of the rows."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import msgspec

from actors.requests import Request, RequestUpdate
from cluster.answering.engine import Engine
from cluster.batch.rows import BatchRow, RowError, answered_row, failed_row, parse_row
from cluster.frontend.front_end import ModelFrontend
from cluster.outputs import OutputBuilder
from kernels_integration.errors import InvalidRequestError, LatentrayError, UnavailableError, shown

REORDER_WINDOW = 1024
"""Rows that may be finished or in flight beyond the oldest unfinished one: bounds what is kept in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """How a batch ended."""

    num_rows: int
    num_failed: int
    num_prompt_tokens: int
    num_completion_tokens: int


def run_batch(
    lines: Iterable[str | bytes],
    write: Callable[[str], None],
    *,
    engine: Engine,
    frontend: ModelFrontend,
    max_in_flight: int,
    on_row: Callable[[], None] = lambda: None,
) -> BatchSummary:
    """Answer every row; a row that fails becomes an error row and the batch goes on. Blank lines are skipped.

    write gets the output rows in input order, each as soon as those before it are there.
    Errors: UnavailableError when the engine is lost: the rows that were written stay good.
    """
    run = _Run(lines, frontend, write, on_row)
    with closing(engine.run(run.requests(), max_in_flight=max_in_flight)) as updates:
        for request_id, update in updates:
            run.take(request_id, update)
    return run.summary()


@dataclass(slots=True)
class _Pending:
    """A row on its way: `result` is its output row, once known."""

    request_id: str
    """Of the row; of several requests the first has it, the others have -1, -2 and so on behind it."""
    row: BatchRow | None = None
    builders: dict[str, OutputBuilder] = field(default_factory=dict)
    """By request, in the order of the row's prompts."""
    result: dict[str, Any] | None = None


class _Run:
    """State of one batch. Request ids are row numbers, counted from 1 over non-blank lines."""

    def __init__(
        self,
        lines: Iterable[str | bytes],
        frontend: ModelFrontend,
        write: Callable[[str], None],
        on_row: Callable[[], None],
    ) -> None:
        self._lines = ((i, line) for i, line in enumerate(lines, start=1) if line.strip())
        self._frontend = frontend
        self._write = write
        self._on_row = on_row
        self._pending: deque[_Pending] = deque()
        self._in_flight: dict[str, _Pending] = {}
        self._custom_ids: set[str] = set()
        self._num_rows = 0
        self._num_failed = 0
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0

    def requests(self) -> Iterator[Request | None]:
        """The rows' requests, where rows have one; None while too many rows wait for an older one."""
        while True:
            while len(self._pending) >= REORDER_WINDOW:
                yield None
            if (numbered := next(self._lines, None)) is None:
                return
            line_number, line = numbered
            if requests := self._admit(line_number, line):
                yield from requests
            else:
                self._write_finished()

    def _admit(self, line_number: int, line: str | bytes) -> list[Request]:
        """Its requests; [] for a row that has failed."""
        self._num_rows += 1
        request_id = str(self._num_rows)
        pending = _Pending(request_id)
        self._pending.append(pending)
        custom_id: str | None = None
        try:
            pending.row = parse_row(line, self._frontend, line_number=line_number)
            custom_id = pending.row.custom_id
            if custom_id in self._custom_ids:
                raise InvalidRequestError(
                    f"custom_id {shown(custom_id)} is taken by an earlier row; make each one unique",
                    field="custom_id",
                )
            self._custom_ids.add(custom_id)
            requests = pending.row.body.to_requests(request_id, self._frontend)
        except RowError as error:
            self._fail(pending, error.cause, custom_id=error.custom_id, request_id=request_id)
            return []
        except LatentrayError as error:
            self._fail(pending, error, custom_id=custom_id, request_id=request_id)
            return []
        requests[1:] = [
            msgspec.structs.replace(request, request_id=f"{request_id}-{index}")
            for index, request in enumerate(requests[1:], start=1)
        ]
        for request in requests:
            pending.builders[request.request_id] = OutputBuilder(request, self._frontend)
            self._in_flight[request.request_id] = pending
        return requests

    def take(self, request_id: str, update: RequestUpdate | Exception) -> None:
        """Add what the engine reports. Errors: UnavailableError; what no row can be the cause of."""
        pending = self._in_flight[request_id]
        assert pending.row is not None
        builder = pending.builders[request_id]
        if isinstance(update, Exception):
            if isinstance(update, UnavailableError) or not isinstance(update, LatentrayError):
                raise update
            del self._in_flight[request_id]
            if pending.result is None:
                custom_id = pending.row.custom_id
                self._fail(pending, update, custom_id=custom_id, request_id=pending.request_id)
            self._write_finished()
            return
        builder.push(update)
        if update.finish_reason is not None:
            self._num_completion_tokens += update.num_completion_tokens
        if builder.finished:
            del self._in_flight[request_id]
            self._num_prompt_tokens += update.num_prompt_tokens
            builders = list(pending.builders.values())
            if pending.result is None and all(builder.finished for builder in builders):
                pending.result = answered_row(
                    pending.row, builders, self._frontend, request_id=pending.request_id
                )
                pending.builders = {}
        self._write_finished()

    def _write_finished(self) -> None:
        """Write the output rows whose predecessors are all written."""
        while self._pending and (result := self._pending[0].result) is not None:
            self._pending.popleft()
            self._write(json.dumps(result, ensure_ascii=False))
            self._on_row()

    def summary(self) -> BatchSummary:
        return BatchSummary(
            num_rows=self._num_rows,
            num_failed=self._num_failed,
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_completion_tokens,
        )

    def _fail(
        self, pending: _Pending, error: LatentrayError, *, custom_id: str | None, request_id: str
    ) -> None:
        self._num_failed += 1
        pending.result = failed_row(error, custom_id=custom_id, request_id=request_id)
