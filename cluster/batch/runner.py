"""Rows through an engine, a bounded number at a time; each gets one output row."""

import heapq
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from actors.requests import Request, RequestUpdate
from cluster.answering.engine import Engine
from cluster.batch.results import Results
from cluster.batch.rows import InputRow, KnownRow, answered_row, digest, failed_row, know, parse_row
from cluster.batch.window import in_windows
from cluster.errors import outcome
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.bodies import Body
from cluster.outputs import OutputBuilder
from kernels_integration.errors import InvalidRequestError, LatentrayError, UnavailableError, shown

MAX_RETRIES = 3
FIRST_RETRY_S = 0.5
"""Doubled with each further one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """How a run ended. Rows that an earlier run has answered are among num_rows and num_failed alone."""

    num_rows: int
    num_failed: int
    num_prompt_tokens: int
    num_completion_tokens: int


def run_batch(
    rows: Iterable[InputRow],
    results: Results,
    *,
    engine: Engine | None,
    frontend: ModelFrontend,
    max_in_flight: int,
    seed: int = 0,
    on_row: Callable[[bool], None] = lambda was_asked: None,
    sleep: Callable[[float], None] = time.sleep,
) -> BatchSummary:
    """Answer every row that `results` does not know; one that fails gets an error row, and the batch goes on.

    A failure that may pass is tried again, up to MAX_RETRIES times. seed: rows without one get theirs from it
    and their custom_id, so that an answer does not depend on when and beside what it was asked for.
    on_row: is told of each row, with False where an earlier run has answered it. engine: None where no row
    needs one: each is known, or refused as it is read.
    Errors: UnavailableError when the engine is lost: the rows that are done stay good.
    """
    run = _Run(rows, results, frontend, seed=seed, max_in_flight=max_in_flight, on_row=on_row, sleep=sleep)
    if engine is None:
        asked = [request for request in run.requests() if request is not None]
        assert not asked, "no row needs an engine"
        return run.summary()
    with closing(engine.run(run.requests(), max_in_flight=max_in_flight)) as updates:
        for request_id, update in updates:
            run.take(request_id, update)
    return run.summary()


@dataclass(slots=True, kw_only=True)
class _Pending:
    """A row on its way.

    place: counted from 0. requests: one of each prompt; the first has the row's id, the others have -1, -2
    and so on behind it.
    """

    place: int
    custom_id: str
    key: bytes
    body: Body
    requests: list[Request]
    num_bytes: int
    num_tries: int = 0

    @property
    def request(self) -> Request:
        """The one that stands for the row."""
        return self.requests[0]


@dataclass(slots=True, kw_only=True)
class _Try:
    """A row with the engine. builders: by the ids of this try, in the order of the row's requests."""

    pending: _Pending
    builders: dict[str, OutputBuilder]
    num_live: int
    failure: LatentrayError | None = None


@dataclass(order=True, slots=True)
class _Retry:
    due_s: float
    pending: _Pending = field(compare=False)


class _Run:
    """State of one run."""

    def __init__(
        self,
        rows: Iterable[InputRow],
        results: Results,
        frontend: ModelFrontend,
        *,
        seed: int,
        max_in_flight: int,
        on_row: Callable[[bool], None],
        sleep: Callable[[float], None],
    ) -> None:
        self._rows = in_windows(self._unanswered(rows), num_first=max_in_flight)
        self._results = results
        self._frontend = frontend
        self._seed = seed
        self._on_row = on_row
        self._sleep = sleep
        self._in_flight: dict[str, _Try] = {}
        self._retries: list[_Retry] = []
        self._custom_ids: set[bytes] = set()
        self._num_rows = 0
        self._num_failed = 0
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0

    def requests(self) -> Iterator[Request | None]:
        """The rows' requests, where rows have one; None while all that may come is one to try again."""
        for pending in self._rows:
            while self._retries and self._retries[0].due_s <= time.monotonic():
                yield from self._begun(heapq.heappop(self._retries).pending)
            yield from self._begun(pending)
        while self._retries or self._in_flight:
            wait_s = self._retries[0].due_s - time.monotonic() if self._retries else 0.0
            if self._in_flight and (wait_s > 0 or not self._retries):
                yield None
                continue
            if wait_s > 0:
                self._sleep(wait_s)
            yield from self._begun(heapq.heappop(self._retries).pending)

    def take(self, request_id: str, update: RequestUpdate | Exception) -> None:
        """Add what the engine reports. Errors: UnavailableError; what no row can be the cause of."""
        current = self._in_flight[request_id]
        builder = current.builders[request_id]
        if isinstance(update, Exception):
            if isinstance(update, UnavailableError) or not isinstance(update, LatentrayError):
                raise update
            current.failure = current.failure or update
        else:
            builder.push(update)
            if update.finish_reason is not None:
                self._num_completion_tokens += update.num_completion_tokens
            if not builder.finished:
                return
            self._num_prompt_tokens += update.num_prompt_tokens
        del self._in_flight[request_id]
        current.num_live -= 1
        if current.num_live == 0:
            self._end(current)

    def summary(self) -> BatchSummary:
        return BatchSummary(
            num_rows=self._num_rows,
            num_failed=self._num_failed,
            num_prompt_tokens=self._num_prompt_tokens,
            num_completion_tokens=self._num_completion_tokens,
        )

    def _unanswered(self, rows: Iterable[InputRow]) -> Iterator[_Pending]:
        """Rows that the engine has to answer; the others get their output row here."""
        for place, row in enumerate(rows):
            self._num_rows += 1
            if (pending := self._admit(place, row)) is not None:
                yield pending

    def _admit(self, place: int, row: InputRow) -> _Pending | None:
        known = know(row)
        custom_id: str | None = known.custom_id
        request_id, is_taken = f"row-{place + 1}", False
        try:
            if custom_id is not None:
                own = digest(custom_id.encode())
                is_taken = own in self._custom_ids
                if is_taken:
                    raise InvalidRequestError(
                        f"custom_id {shown(custom_id)} is taken by an earlier row; make each one unique",
                        field="custom_id",
                    )
                self._custom_ids.add(own)
                request_id = own.hex()
                if (number := self._results.find(custom_id, known.key)) is not None:
                    self._num_failed += self._results.reuse(place, number)
                    self._on_row(False)
                    return None
            return self._pending(place, known, request_id, num_bytes=len(row.line))
        except LatentrayError as error:
            failed = failed_row(error, custom_id=custom_id, request_id=request_id)
            self._done(place, failed, None if is_taken else custom_id, known.key, failed=True)
            return None

    def _pending(self, place: int, known: KnownRow, request_id: str, *, num_bytes: int) -> _Pending:
        """Errors: InvalidRequestError."""
        body = parse_row(known, self._frontend)
        assert known.custom_id is not None, "parse_row refuses rows without one"
        requests = body.to_requests(request_id, self._frontend)
        return _Pending(
            place=place,
            custom_id=known.custom_id,
            key=known.key,
            body=body,
            requests=[
                replace(
                    request,
                    request_id=f"{request_id}-{index}" if index else request_id,
                    seed=self._seed_of(request, f"{known.custom_id} {index}"),
                )
                for index, request in enumerate(requests)
            ],
            num_bytes=num_bytes,
        )

    def _seed_of(self, request: Request, name: str) -> int:
        if request.params.seed is not None:
            return request.seed
        return int.from_bytes(digest(f"{self._seed} {name}".encode())[:8], "little")

    def _begun(self, pending: _Pending) -> list[Request]:
        """The requests of a row, under ids that no earlier try has had."""
        pending.num_tries += 1
        suffix = f"-try-{pending.num_tries}" if pending.num_tries > 1 else ""
        requests = [replace(r, request_id=f"{r.request_id}{suffix}") for r in pending.requests]
        builders = {
            request.request_id: OutputBuilder(own, self._frontend)
            for request, own in zip(requests, pending.requests, strict=True)
        }
        current = _Try(pending=pending, builders=builders, num_live=len(requests))
        self._in_flight.update(dict.fromkeys(builders, current))
        return requests

    def _end(self, current: _Try) -> None:
        """All requests of a row have ended."""
        pending, error = current.pending, current.failure
        request_id = pending.request.request_id
        if error is None:
            builders = list(current.builders.values())
            row = answered_row(
                pending.custom_id, pending.body, builders, self._frontend, request_id=request_id
            )
        elif outcome(error).http_status >= 429 and pending.num_tries <= MAX_RETRIES:
            delay_s = FIRST_RETRY_S * 2 ** (pending.num_tries - 1)
            heapq.heappush(self._retries, _Retry(time.monotonic() + delay_s, pending))
            return
        else:
            row = failed_row(error, custom_id=pending.custom_id, request_id=request_id)
            if pending.num_tries > 1:
                row["error"]["message"] += f" (tried {pending.num_tries} times)"
        self._done(pending.place, row, pending.custom_id, pending.key, failed=error is not None)

    def _done(
        self, place: int, row: dict[str, Any], custom_id: str | None, key: bytes, *, failed: bool
    ) -> None:
        """custom_id: None where none stands for the row."""
        self._num_failed += failed
        self._results.add(
            place, json.dumps(row, ensure_ascii=False), custom_id=custom_id, key=key, failed=failed
        )
        self._on_row(True)
