"""A real coordinator loop with its channels, a scripted coordinator and echo shards, in threads."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import zmq

from actors.coordinator_loop import CoordinatorLoop
from actors.messages import StepInput, StepOutput
from actors.transport import request_channel, step_channel
from actors.transport.step_channel import ShardEnd
from cluster.answering.group_client import GroupClient
from kernels_integration.errors import UnavailableError
from tests.support.scripted_coordinator import EchoShard, ScriptedCoordinator

Execute = Callable[[StepInput, Callable[[StepOutput], None]], None]


class LoopGroup:
    """A coordinator loop and two shards in threads."""

    def __init__(
        self,
        execute: Execute | None = None,
        *,
        capacity: int = 100,
        client_silence_s: float = 10.0,
        **limits: float,
    ) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.coordinator = ScriptedCoordinator(capacity)
        self.ends = step_channel.CoordinatorEnd(2, tick_s=0.05, context=self.context)
        self.desk_end = request_channel.CoordinatorEnd(silence_s=client_silence_s, context=self.context)
        self.address = self.desk_end.address
        self.loop = CoordinatorLoop(self.coordinator, self.ends, self.desk_end, tick_s=0.05, **limits)
        self.shards = [self.shard(rank) for rank in range(2)]
        self.echoes = [EchoShard(), EchoShard()]
        executes = [execute or self.echoes[0].execute, self.echoes[1].execute]
        self.threads = [threading.Thread(target=self.loop.run, name="coordinator")] + [
            threading.Thread(target=self._run_shard, args=(end, run), name="shard")
            for end, run in zip(self.shards, executes, strict=True)
        ]

    def shard(self, rank: int, epoch: int = 0) -> ShardEnd:
        return ShardEnd(self.ends.address, rank, epoch=epoch, beat_s=0.05, context=self.context)

    def start(self, *, ready: bool = True) -> None:
        for thread in self.threads:
            thread.start()
        if ready:
            for shard in self.shards:
                shard.ready()

    def stop(self) -> None:
        self.loop.stop()
        for thread in self.threads:
            thread.join(5)
            assert not thread.is_alive()
        for shard in self.shards:
            shard.close()
        self.context.destroy(linger=0)

    def pause(self, seconds: float) -> None:
        """Stop the loop's thread for a while, as SIGSTOP or a long calculation would."""
        self.loop._command(lambda: time.sleep(seconds))

    @staticmethod
    def _run_shard(end: ShardEnd, execute: Execute) -> None:
        with contextlib.suppress(UnavailableError):  # of a lifeline that a test has cut
            while (step := end.receive()) is not None:
                execute(step, end.report if end.rank == 0 else lambda output: None)


@asynccontextmanager
async def served(group: LoopGroup) -> AsyncIterator[GroupClient]:
    group.start()
    client = GroupClient(group.address, silence_s=1.0, give_up_s=1.0)
    try:
        await client.connect()
        await eventually(lambda: client.healthy)
        yield client
    finally:
        await client.close()
        group.stop()


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def endless(step_s: float) -> Execute:
    shard = EchoShard()

    def execute(step: StepInput, report: Callable[[StepOutput], None]) -> None:
        time.sleep(step_s)
        shard.execute(step, report)

    return execute
