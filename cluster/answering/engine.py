"""A group as a program sees it: submit requests, take what became known, without an event loop."""

from collections.abc import Callable, Iterable
from typing import Literal, Protocol, get_args

import tokenizers

from actors.config import GroupConfig
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.stats import GroupStats
from cluster.report.trace import TraceFile
from kernels_integration.errors import ConfigError
from kernels_integration.spans import Span

Executor = Literal["ray", "inline"]
Progress = Callable[[str], None]


class Engine(Protocol):
    """One group. Used by one thread."""

    def submit(self, request: Request) -> None:
        """Hand a request over; its updates come from `updates`."""
        ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests. Updates that were under way may still come."""
        ...

    def updates(self) -> list[RequestUpdate | RequestFailed]:
        """Wait until something became known of the submitted requests. [] when none is live."""
        ...

    def stats(self) -> GroupStats: ...

    def take_trace(self) -> dict[str, list[Span]]:
        """By actor: where time went since the last call; empty lists unless config.trace."""
        ...

    def close(self) -> None: ...


def start_engine(
    config: GroupConfig,
    *,
    executor: str,
    tokenizer: tokenizers.Tokenizer,
    address: str | None = None,
    progress: Progress | None = None,
    trace_file: str | None = None,
) -> Engine:
    """Start a group: inside this process, or on Ray (joined at `address`, or started and stopped here).

    trace_file: written when the engine is closed, if config.trace.
    Errors: ConfigError for another executor; CheckpointError; ClusterTooSmallError, UnavailableError.
    """
    if trace_file is not None:
        from cluster.answering.traced_engine import TracedEngine

        return TracedEngine(
            TraceFile(trace_file),
            start_engine(config, executor=executor, tokenizer=tokenizer, address=address, progress=progress),
        )
    if executor == "inline":
        from cluster.answering.inline_engine import InlineEngine

        return InlineEngine(config, tokenizer=tokenizer)
    if executor == "ray":
        from cluster.answering.ray_engine import RayEngine

        return RayEngine(config, address=address, progress=progress)
    raise ConfigError(f"executor is {executor!r}; it must be one of {', '.join(get_args(Executor))}")
