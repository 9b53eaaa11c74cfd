"""A whole group inside this process, without Ray or sockets: for notebooks, tests and debugging.

The same coordinator and shards as on a cluster. One rank runs in the caller's thread; more run as
threads that meet in in-process collectives.
"""

import queue
import threading
from collections.abc import Callable

import torch
from tokenizers import Tokenizer

from actors.config import GroupConfig
from actors.coordinator.coordinator import Coordinator
from actors.messages import StepInput, StepOutput
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.shard.build import build_shard
from actors.shard.shard import Shard
from actors.stats import GroupStats
from kernels_integration.collectives import Collectives, SoloCollectives
from kernels_integration.collectives.in_process import InProcessCollectives


class InlineGroup:
    """Coordinator and shards of one group, stepped by the caller.

    tokenizer finds stop strings; without one, requests with stop strings are refused.
    """

    def __init__(self, config: GroupConfig, *, tokenizer: Tokenizer | None = None) -> None:
        self._shards = _start_shards(config)
        self._coordinator = Coordinator(config, tokenizer=tokenizer)

    @property
    def has_work(self) -> bool:
        return self._coordinator.has_work

    def submit(self, request: Request) -> None:
        self._coordinator.submit(request)

    def abort(self, request_ids: list[str]) -> None:
        self._coordinator.abort(request_ids)

    def stats(self) -> GroupStats:
        return self._coordinator.stats()

    def step(self) -> list[RequestUpdate | RequestFailed]:
        """Run one step, if anything can be scheduled, and return what became known."""
        step = self._coordinator.schedule()
        if step is not None:
            self._coordinator.process(self._shards.execute(step))
        return self._coordinator.take_updates()

    def close(self) -> None:
        self._shards.close()


class _CallerShard:
    """The only rank, run by the caller."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def execute(self, step: StepInput) -> StepOutput:
        outputs: list[StepOutput] = []
        self._shard.execute(step, outputs.append)
        return outputs[0]

    def close(self) -> None:
        pass


class _ThreadedShards:
    """One thread a rank. A rank that fails closes its collectives, which releases the others."""

    def __init__(
        self, size: int, build: Callable[[int], Shard], collectives: list[list[Collectives]]
    ) -> None:
        self._build = build
        self._collectives = collectives
        self._inboxes: list[queue.SimpleQueue[StepInput | None]] = [queue.SimpleQueue() for _ in range(size)]
        self._results: queue.SimpleQueue[StepOutput | Exception | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"shard-{rank}", daemon=True)
            for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()
        self._collect()  # every rank has loaded

    def execute(self, step: StepInput) -> StepOutput:
        for inbox in self._inboxes:
            inbox.put(step)
        output = self._collect()
        assert output is not None, "rank 0 did not report"
        return output

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, rank: int) -> None:
        # The ranks share the cores: threads inside operators would only slow each other down.
        torch.set_num_threads(1)
        try:
            shard = self._build(rank)
            self._results.put(None)
            while (step := self._inboxes[rank].get()) is not None:
                outputs: list[StepOutput] = []
                shard.execute(step, outputs.append)
                self._results.put(outputs[0] if outputs else None)
        except Exception as error:
            for member in self._collectives[rank]:
                member.close()
            self._results.put(error)

    def _collect(self) -> StepOutput | None:
        """Wait for every rank; the first cause of a failure is raised."""
        results = [self._results.get() for _ in self._threads]
        errors = [result for result in results if isinstance(result, Exception)]
        if errors:
            raise next((e for e in errors if getattr(e, "code", "") != "collective_failed"), errors[0])
        return next((result for result in results if isinstance(result, StepOutput)), None)


def _start_shards(config: GroupConfig) -> _CallerShard | _ThreadedShards:
    size, dcp_size = config.tensor_parallel_size, config.decode_context_parallel_size
    if size == 1:
        return _CallerShard(build_shard(config, tp=SoloCollectives(), dcp_comm=SoloCollectives()))
    tp = InProcessCollectives.create(size)
    dcp: list[Collectives] = []
    for _ in range(size // dcp_size):
        dcp.extend(InProcessCollectives.create(dcp_size) if dcp_size > 1 else [SoloCollectives()])

    def build(rank: int) -> Shard:
        return build_shard(config, tp=tp[rank], dcp_comm=dcp[rank])

    return _ThreadedShards(size, build, [[tp[rank], dcp[rank]] for rank in range(size)])
