"""An engine that writes down where its time went."""

from collections.abc import Iterable

from actors.requests import Request, RequestFailed, RequestUpdate
from actors.stats import GroupStats
from cluster.answering.engine import Engine
from cluster.report.trace import TraceFile
from kernels_integration.spans import Span


class TracedEngine:
    """Another engine, whose trace is written when it is closed."""

    def __init__(self, file: TraceFile, engine: Engine) -> None:
        self._file = file
        self._engine = engine

    def submit(self, request: Request) -> None:
        self._engine.submit(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        self._engine.abort(request_ids)

    def updates(self) -> list[RequestUpdate | RequestFailed]:
        return self._engine.updates()

    def stats(self) -> GroupStats:
        return self._engine.stats()

    def take_trace(self) -> dict[str, list[Span]]:
        return self._engine.take_trace()

    def close(self) -> None:
        try:
            self._file.add(self._engine.take_trace())
            self._file.write()
        finally:
            self._engine.close()
