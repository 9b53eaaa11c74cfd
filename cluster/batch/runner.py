"""Rows through an engine, a bounded number at a time, answers in the order of the rows."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from actors.requests import RequestFailed, RequestUpdate
from cluster.answering.engine import Engine
from cluster.batch.rows import BatchRow, RowError, answered_row, failed_row, parse_row
from cluster.errors import from_code
from cluster.frontend.front_end import ModelFrontend
from cluster.outputs import OutputBuilder
from kernels_integration.errors import InvalidRequestError, LatentrayError, UnavailableError

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
    run = _Run(lines, engine=engine, frontend=frontend)
    try:
        while True:
            while run.num_in_flight < max_in_flight and run.num_pending < REORDER_WINDOW and run.admit():
                pass
            for row in run.finished_in_order():
                write(json.dumps(row, ensure_ascii=False))
                on_row()
            if run.num_in_flight:
                run.take(engine.updates())
            elif run.num_pending == 0 and run.is_read:
                return run.summary()
    finally:
        run.abort()


@dataclass(slots=True)
class _Pending:
    """A row on its way: `result` is its output row, once known."""

    row: BatchRow | None = None
    builder: OutputBuilder | None = None
    result: dict[str, Any] | None = None


class _Run:
    """State of one batch. Request ids are row numbers, counted from 1 over non-blank lines."""

    def __init__(self, lines: Iterable[str | bytes], *, engine: Engine, frontend: ModelFrontend) -> None:
        self._lines = ((i, line) for i, line in enumerate(lines, start=1) if line.strip())
        self._engine = engine
        self._frontend = frontend
        self._pending: deque[_Pending] = deque()
        self._in_flight: dict[str, _Pending] = {}
        """By the id of each of a row's completions."""
        self._num_in_flight = 0
        self._custom_ids: set[str] = set()
        self._num_rows = 0
        self._num_failed = 0
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self.is_read = False

    @property
    def num_in_flight(self) -> int:
        """Rows that the engine is answering."""
        return self._num_in_flight

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def admit(self) -> bool:
        """Take the next row. False when there is none."""
        numbered = next(self._lines, None)
        if numbered is None:
            self.is_read = True
            return False
        line_number, line = numbered
        self._num_rows += 1
        request_id = str(self._num_rows)
        pending = _Pending()
        self._pending.append(pending)
        custom_id: str | None = None
        try:
            pending.row = parse_row(line, self._frontend, line_number=line_number)
            custom_id = pending.row.custom_id
            if custom_id in self._custom_ids:
                raise InvalidRequestError(
                    f"custom_id {custom_id!r} is taken by an earlier row; make each one unique",
                    field="custom_id",
                )
            self._custom_ids.add(custom_id)
            request = pending.row.body.to_request(request_id, self._frontend)
        except RowError as error:
            self._fail(pending, error.cause, custom_id=error.custom_id, request_id=request_id)
            return True
        except LatentrayError as error:
            self._fail(pending, error, custom_id=custom_id, request_id=request_id)
            return True
        pending.builder = OutputBuilder(request, self._frontend)
        self._num_in_flight += 1
        for part in pending.builder.requests:
            self._in_flight[part.request_id] = pending
            self._engine.submit(part)
        return True

    def take(self, updates: list[RequestUpdate | RequestFailed]) -> None:
        """Add what the engine reports. Errors: UnavailableError."""
        assert updates, "the engine lost requests"
        for update in updates:
            pending = self._in_flight.get(update.request_id)
            if pending is None:
                continue
            assert pending.row is not None
            assert pending.builder is not None
            if isinstance(update, RequestFailed):
                self._withdraw(pending.builder, but=update.request_id)
                error = from_code(update.code, update.message)
                if isinstance(error, UnavailableError):
                    raise error
                request_id = pending.builder.request.request_id
                self._fail(pending, error, custom_id=pending.row.custom_id, request_id=request_id)
                continue
            pending.builder.push(update)
            if update.finish_reason is not None:
                del self._in_flight[update.request_id]
                self._num_completion_tokens += update.num_completion_tokens
            if pending.builder.finished:
                self._num_in_flight -= 1
                self._num_prompt_tokens += update.num_prompt_tokens
                output = pending.builder.output()
                pending.result = answered_row(pending.row, output, model=self._frontend.served_model_name)
                pending.builder = None

    def finished_in_order(self) -> Iterator[dict[str, Any]]:
        """Output rows whose predecessors were all given out."""
        while self._pending and (result := self._pending[0].result) is not None:
            self._pending.popleft()
            yield result

    def abort(self) -> None:
        """End what is still in flight (after an error or an interruption)."""
        if self._in_flight:
            self._engine.abort(self._in_flight)

    def summary(self) -> BatchSummary:
        return BatchSummary(
            num_rows=self._num_rows,
            num_failed=self._num_failed,
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_completion_tokens,
        )

    def _withdraw(self, builder: OutputBuilder, *, but: str) -> None:
        """End the other completions of a row of which one failed."""
        live = [part.request_id for part in builder.requests if part.request_id in self._in_flight]
        for request_id in live:
            del self._in_flight[request_id]
        self._num_in_flight -= 1
        self._engine.abort([request_id for request_id in live if request_id != but])

    def _fail(
        self, pending: _Pending, error: LatentrayError, *, custom_id: str | None, request_id: str
    ) -> None:
        self._num_failed += 1
        pending.result = failed_row(error, custom_id=custom_id, request_id=request_id)
