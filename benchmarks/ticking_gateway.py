"""A gateway in a process of its own, before a group that gives each stream a token at each tick."""

import asyncio
import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from actors.requests import Request, RequestUpdate, SequenceKey
from actors.stats import GroupStats
from benchmarks import harness
from cluster.answering.group import Deliver
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway import GatewayServer

TICK_S = 0.05
"""As an engine with 50 ms a step."""


class TickingGroup:
    """Implements what a gateway needs of a Group: a token for each sequence at each tick of the clock."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self.healthy = True
        self.message = ""
        self.stats: GroupStats | None = GroupStats()
        self.live: dict[SequenceKey, tuple[Request, Deliver, int]] = {}
        """With the number of tokens that each has."""

    def submit(self, request: Request, deliver: Deliver) -> None:
        self.live[request.key] = (request, deliver, 0)

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        for key in keys:
            self.live.pop(key, None)

    async def connect(self) -> None:
        pass

    async def tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s - time.monotonic() % self._tick_s)
            self.give()

    def give(self) -> None:
        """One token for each stream."""
        for key, (request, deliver, done) in list(self.live.items()):
            is_last = done + 1 == request.params.max_tokens
            self.live[key] = (request, deliver, done + 1)
            if is_last:
                del self.live[key]
            deliver(
                RequestUpdate(
                    request_id=key.request_id,
                    incarnation=key.incarnation,
                    index=key.index,
                    token_ids=(500 + done,),
                    finish_reason="length" if is_last else None,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_completion_tokens=done + 1,
                )
            )


class TickingGateway:
    """The process, as its clients see it."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self._process = process
        self._pipe = pipe
        self.address: str
        """host:port of gRPC."""
        self.http_port: int
        self.address, self.http_port = pipe.recv()

    def left(self) -> tuple[int, int]:
        """How many sequences live, and how many files are open."""
        self._pipe.send("left?")
        found: tuple[int, int] = self._pipe.recv()
        return found

    @property
    def resident_bytes(self) -> int:
        fields = Path(f"/proc/{self._process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def ticking_gateway(tick_s: float = TICK_S, *, max_model_len: int = 1024) -> Iterator[TickingGateway]:
    """From its start, which waits until it listens, to its end."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, tick_s, max_model_len), daemon=True
    )
    process.start()
    try:
        yield TickingGateway(process, ours)
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection, tick_s: float, max_model_len: int) -> None:
    async def run() -> None:
        config = harness.config(max_model_len=max_model_len, kv_cache_memory_bytes="64M")
        group = TickingGroup(tick_s)
        frontend = ModelFrontend.of_group(config)
        server = GatewayServer(groups=[group], config=config, frontend=frontend, port=0, http_port=0)  # type: ignore[list-item]
        await server.start()
        pipe.send((server.address, server.http_port))

        def tell() -> None:
            while pipe.recv():
                pipe.send((len(group.live), len(os.listdir("/proc/self/fd"))))

        threading.Thread(target=tell, daemon=True).start()
        await group.tick()

    asyncio.run(run())
