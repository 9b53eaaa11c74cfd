"""Answering for programs without an event loop: `LLM`, the command line, batches, benchmarks."""

import asyncio
import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import aclosing
from itertools import islice
from typing import Any, Literal, TypeVar, get_args

import tokenizers

from actors.config import GroupConfig
from actors.requests import Request, RequestUpdate
from actors.stats import GroupStats
from cluster.answering.answering import Answering
from cluster.answering.group import Group
from cluster.answering.group_client import ClientFollower, GroupClient
from cluster.report.trace import TraceFile
from kernels_integration.errors import ConfigError, UnavailableError
from kernels_integration.spans import Span

Executor = Literal["ray", "inline"]
Progress = Callable[[str], None]
Result = TypeVar("Result")
_EXPLAIN_LOOK_S = 0.05
_EXPLAIN_TRIES = 40


class Engine:
    """One group behind blocking calls; its event loop runs in a thread of its own.

    take_trace: by actor, where time went since the last call. stop: ends the group, when the engine is
    closed. trace_file: gets the trace then. failure: what has ended the group, once that is known, for
    streams that know only of a closed connection.
    """

    def __init__(
        self,
        group: Group,
        *,
        take_trace: Callable[[], dict[str, list[Span]]],
        stop: Callable[[], None],
        trace_file: TraceFile | None = None,
        failure: Callable[[], str | None] | None = None,
    ) -> None:
        self.take_trace = take_trace
        self._failure = failure
        self._stop_group = stop
        self._trace_file = trace_file
        self._group = group
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="answering", daemon=True)
        self._thread.start()
        try:
            self._answering = self._call(self._connect())
        except BaseException:
            self._leave()
            raise

    def run(
        self, requests: Iterable[Request | None], *, max_in_flight: int | None = None
    ) -> Generator[tuple[str, RequestUpdate | Exception], None, None]:
        """Answer requests; yields (request id, an update of the request or what ended it), as they come.

        requests: read as they can begin, at most max_in_flight before others have ended. A None among them
        says "none for now": the next one is asked for after an update of one that runs. Ids are unique.
        Leaving the loop early ends what still runs.
        """
        arrived: queue.SimpleQueue[tuple[str, RequestUpdate | Exception | None]] = queue.SimpleQueue()
        tasks: set[asyncio.Task[None]] = set()
        source = iter(requests)
        num_live, room = 0, max_in_flight or sys.maxsize
        try:
            while True:
                beginning = _up_to_none(islice(source, room - num_live))
                if beginning:  # together, so that no step runs before the last of them is known
                    num_live += len(beginning)
                    self._loop.call_soon_threadsafe(self._begin, beginning, arrived.put, tasks)
                if not num_live:
                    return
                request_id, update = arrived.get()
                if update is None:
                    num_live -= 1
                else:
                    yield request_id, update
        finally:
            self._call(_cancelled(tasks))

    def stats(self) -> GroupStats:
        """Counters of the group since it started, as of now."""
        return self._call(self._group.current_stats())

    def call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call it in the event loop; from any thread, and after `close` for nothing."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """End what runs, write the trace, stop the group."""
        try:
            if self._trace_file is not None:
                self._trace_file.add(self.take_trace())
                self._trace_file.write()
        finally:
            self._leave()

    async def _connect(self) -> Answering:
        await self._group.connect()
        return Answering((self._group,))

    def _begin(
        self,
        requests: Iterable[Request],
        put: Callable[[tuple[str, RequestUpdate | Exception | None]], None],
        tasks: "set[asyncio.Task[None]]",
    ) -> None:
        async def follow(request: Request) -> None:
            try:
                async with aclosing(self._answering.run(request)) as updates:
                    async for update in updates:
                        put((request.request_id, update))
            except UnavailableError as error:
                put((request.request_id, await self._explained(error)))
            except Exception as error:
                put((request.request_id, error))
            put((request.request_id, None))

        for request in requests:
            task = self._loop.create_task(follow(request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _explained(self, error: UnavailableError) -> UnavailableError:
        """With the cause in the place of the symptom, where it is found soon."""
        for _ in range(_EXPLAIN_TRIES if self._failure is not None else 0):
            if self._failure is not None and (why := self._failure()) is not None:
                return UnavailableError(why)
            await asyncio.sleep(_EXPLAIN_LOOK_S)
        return error

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _leave(self) -> None:
        try:
            self._call(self._group.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._stop_group()


def _up_to_none(requests: Iterable[Request | None]) -> list[Request]:
    found = []
    for request in requests:
        if request is None:
            break
        found.append(request)
    return found


async def _cancelled(tasks: "set[asyncio.Task[None]]") -> None:
    """End tasks and wait until they have."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def check_executor(executor: str) -> None:
    """Errors: ConfigError for another name than those of Executor."""
    if executor not in get_args(Executor):
        raise ConfigError(f"executor is {executor!r}; it must be one of {', '.join(get_args(Executor))}")


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
    check_executor(executor)
    from cluster.report.memory import require_memory

    require_memory(config, address="local" if executor == "inline" else address)
    trace = None if trace_file is None else TraceFile(trace_file)
    if executor == "inline":
        from actors.inline_group import InlineGroup
        from cluster.answering.local_group import LocalGroup

        inline = InlineGroup(config, tokenizer=tokenizer)
        return Engine(LocalGroup(inline), take_trace=inline.take_trace, stop=inline.close, trace_file=trace)
    from cluster.launch.group import launch_group

    handle = launch_group(config, address=address, progress=progress or (lambda message: None))
    client = GroupClient(
        handle.request_address,
        keys=handle.request_keys,
        recovery_s=config.recovery_timeout_s if config.max_restarts else 0.0,
    )
    engine = Engine(
        client,
        take_trace=handle.take_trace,
        stop=handle.stop,
        trace_file=trace,
        failure=lambda: handle.failure,
    )
    handle.follow(ClientFollower(client, engine.call_soon))
    return engine
