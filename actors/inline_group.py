"""A whole group inside this process, without Ray or sockets: for notebooks, tests and debugging.

The same coordinator and shards as on a cluster. Each rank is a thread; they meet in in-process
collectives. In deferred mode they run the next step while the caller reads the last one's tokens.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import torch
from tokenizers import Tokenizer

from actors.config import GroupConfig
from actors.coordinator.coordinator import Coordinator
from actors.messages import StepInput, StepOutput
from actors.requests import Request, RequestFailed, RequestUpdate, SequenceKey
from actors.shard.build import build_shard
from actors.shard.device_shard import DeviceShard
from actors.shard.shard import Shard
from actors.stats import GroupStats
from kernels_integration.collectives import Collectives, SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.spans import Span, Spans

_SETTLE_EVERY_S = 50e-6
"""How often a shard that waits for its next step looks whether one has ended."""


class InlineGroup:
    """Coordinator and shards of one group, stepped by the caller.

    tokenizer finds stop strings; without one, requests with stop strings are refused.
    clock: the coordinator's, in seconds.
    """

    def __init__(
        self,
        config: GroupConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spans = Spans(is_on=config.trace)
        self._shard_spans = [Spans(is_on=config.trace) for _ in range(config.tensor_parallel_size)]
        self._shards = _start_shards(config, self._shard_spans)
        self._coordinator = Coordinator(config, tokenizer=tokenizer, clock=clock, spans=self._spans)

    @property
    def has_work(self) -> bool:
        return self._coordinator.has_work

    def submit(self, request: Request) -> None:
        self._coordinator.submit(request)

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        self._coordinator.abort(keys)

    def stats(self) -> GroupStats:
        return self._coordinator.stats()

    def step(self) -> list[RequestUpdate | RequestFailed]:
        """Send what can be scheduled, wait for one report, and return what became known."""
        while (step := self._coordinator.schedule()) is not None:
            with self._spans("send", step.step):
                self._shards.send(step)
        if self._coordinator.num_outstanding_steps:
            with self._spans("idle"):
                report = self._shards.next_report()
            self._coordinator.process(report)
        return self._coordinator.take_updates()

    def take_trace(self) -> dict[str, list[Span]]:
        """By actor: where time went since the last call. Empty lists unless config.trace."""
        shards = {f"shard {rank}": spans.take() for rank, spans in enumerate(self._shard_spans)}
        return {"coordinator": self._spans.take()} | shards

    def close(self) -> None:
        self._shards.close()


class _ThreadedShards:
    """One thread a rank, and num_threads in its operators.

    A rank that fails closes its collectives, which releases the others.
    """

    def __init__(
        self,
        build: Callable[[int], Shard | DeviceShard],
        collectives: list[list[Collectives]],
        spans: list[Spans],
        *,
        num_threads: int,
    ) -> None:
        size = len(spans)
        self._spans = spans
        self._build = build
        self._num_threads = num_threads
        self._collectives = collectives
        self._inboxes: list[queue.SimpleQueue[StepInput | None]] = [queue.SimpleQueue() for _ in range(size)]
        self._results: queue.SimpleQueue[StepOutput | Exception | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"shard-{rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()
        self._wait_loaded()

    def send(self, step: StepInput) -> None:
        for inbox in self._inboxes:
            inbox.put(step)

    def next_report(self) -> StepOutput:
        """Wait for rank 0's next report. Errors: the first cause of a failure of any rank."""
        result = self._results.get()
        if isinstance(result, Exception):
            self._results.put(result)  # whoever asks again shall not wait for ever
            raise result
        assert result is not None
        return result

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, rank: int) -> None:
        torch.set_num_threads(self._num_threads)  # torch keeps it per thread
        try:
            shard, spans = self._build(rank), self._spans[rank]

            def report(output: StepOutput) -> None:
                with spans("report"):
                    self._results.put(output)

            self._results.put(None)
            while (step := _next_step(shard, self._inboxes[rank])) is not None:
                with spans("step", step.step):
                    shard.execute(step, report)
        except Exception as error:
            self._results.put(error)  # before the others fail for want of this rank
            for member in self._collectives[rank]:
                member.close()

    def _wait_loaded(self) -> None:
        for _ in self._threads:
            if isinstance(result := self._results.get(), Exception):
                raise result


def _next_step(shard: Shard | DeviceShard, inbox: "queue.SimpleQueue[StepInput | None]") -> StepInput | None:
    """Wait for it; until it comes, steps that the device ends are reported."""
    while not shard.settle(wait=False):
        with suppress(queue.Empty):
            return inbox.get(timeout=_SETTLE_EVERY_S)
    return inbox.get()


def _start_shards(config: GroupConfig, spans: list[Spans]) -> _ThreadedShards:
    topology = config.topology
    tp = _collectives(topology.tp)
    dcp = [member for ranks in topology.dcp_groups for member in _collectives(len(ranks))]

    def build(rank: int) -> Shard | DeviceShard:
        return build_shard(config, tp=tp[rank], dcp_comm=dcp[rank], spans=spans[rank])

    collectives = [[tp[rank], dcp[rank]] for rank in range(topology.tp)]
    return _ThreadedShards(build, collectives, spans, num_threads=config.num_threads)


def _collectives(size: int) -> list[Collectives]:
    return list(InProcessCollectives.create(size)) if size > 1 else [SoloCollectives()]
