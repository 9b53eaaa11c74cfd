"""The coordinator's loop: requests in, steps out, reports in, updates out. One thread, no Ray.

The loop sleeps in poll() until a message, a command of another thread or the next tick. A report is
answered with the next step before its updates are sent, so that the shards do not wait for them; in
deferred mode the next step waits at the shards already, and all of this happens while they run it.
"""

import contextlib
import logging
import math
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

import zmq

from actors.messages import StepInput, StepOutput
from actors.request_desk import RequestDesk, RequestPolicy
from actors.stats import GroupStats
from actors.transport import request_channel, step_channel
from actors.transport.request_channel import GroupBeat
from actors.transport.step_channel import ShardFailure
from kernels_integration.errors import LatentrayError, UnavailableError
from kernels_integration.spans import Spans

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Beats are sent and silent peers are looked for this often."""


class StepPolicy(RequestPolicy, Protocol):
    """What the loop drives: `actors.coordinator.Coordinator`, or a scripted one in tests."""

    @property
    def has_work(self) -> bool: ...

    def schedule(self) -> StepInput | None: ...

    def process(self, output: StepOutput) -> None: ...

    def stats(self) -> GroupStats: ...


class CoordinatorLoop:
    """Drives one group until `stop`. A group that failed answers every request with UNAVAILABLE.

    `stop`, `shard_lost` and `wait_failed` may be called from any thread; `run` is called once.
    """

    def __init__(
        self,
        coordinator: StepPolicy,
        shards: step_channel.CoordinatorEnd,
        clients: request_channel.CoordinatorEnd,
        *,
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._shards = shards
        self._clients = clients
        self._tick_s = tick_s
        self._clock = clock
        self._spans = spans or Spans(is_on=False)
        self._desk = RequestDesk(coordinator, clients)
        self._steps_in_flight: set[int] = set()
        self._failure: LatentrayError | None = None
        self._ended = threading.Event()
        self._was_healthy = False
        self._next_tick_s = clock()
        self._stopping = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller = zmq.Poller()
        for source in (shards.socket, clients.socket, self._wake_reader):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Work until `stop`; then end live requests, let the shards go and close the channels."""
        try:
            while not self._stopping:
                try:
                    self._turn()
                except Exception as error:
                    if self._failure is not None:
                        raise
                    logger.exception("the coordinator failed")
                    self._fail(LatentrayError(f"the coordinator failed: {type(error).__name__}: {error}"))
        finally:
            self._stopping = True
            self._desk.fail(UnavailableError("the group is stopping"))
            self._beat()
            self._shards.stop_shards()
            self._shards.close()
            self._clients.close()
            self._wake_reader.close()
            self._ended.set()

    def stop(self) -> None:
        self._command(self._take_stop)

    def shard_lost(self, rank: int, text: str) -> None:
        """The supervisor saw the shard's process end."""
        self._command(lambda: self._lose(rank, text))

    def wait_failed(self, timeout_s: float | None = None) -> str | None:
        """Wait until the group has failed and say why; None when it was stopped, or after timeout_s."""
        self._ended.wait(timeout_s)
        return None if self._failure is None else str(self._failure)

    @property
    def num_ready_shards(self) -> int:
        return self._shards.num_ready

    def _turn(self) -> None:
        wait_s = max(0.0, self._next_tick_s - self._clock())
        with self._spans("idle"):
            ready = dict(self._poller.poll(math.ceil(wait_s * 1000)))
        if self._wake_reader.fileno() in ready:
            self._take_commands()
        if self._shards.socket in ready:
            self._take_reports()
        if self._clients.socket in ready:
            self._desk.receive(self._group_beat(), self._refusal)
        self._schedule()
        with self._spans("updates"):
            self._desk.send_updates()
        if self._clock() >= self._next_tick_s or self._is_healthy != self._was_healthy:
            self._tick()

    def _take_commands(self) -> None:
        self._wake_reader.recv(4096)
        while not self._commands.empty():
            self._commands.get()()

    def _take_reports(self) -> None:
        for message in self._shards.receive():
            if isinstance(message, ShardFailure):
                self._give_up(f"shard {message.rank} failed: {message.text} [{message.code}]")
            elif self._failure is None and message.step in self._steps_in_flight:
                self._steps_in_flight.remove(message.step)
                self._coordinator.process(message)
                self._schedule()

    @property
    def _refusal(self) -> LatentrayError | None:
        """Why no request is taken now; None when they are."""
        if self._failure is None and not self._shards.is_ready:
            return UnavailableError(self._state)
        return self._failure

    def _schedule(self) -> None:
        """Send steps until the coordinator wants a report first."""
        if self._failure is not None or not self._shards.is_ready:
            return
        while self._coordinator.has_work and (step := self._coordinator.schedule()) is not None:
            self._steps_in_flight.add(step.step)
            with self._spans("send", step.step):
                self._shards.send(step)

    def _tick(self) -> None:
        self._next_tick_s = self._clock() + self._tick_s
        for rank in self._shards.silent():
            self._lose(rank, "it has sent no heartbeat")
        self._desk.drop_silent()
        self._beat()

    def _beat(self) -> None:
        self._was_healthy = self._is_healthy
        self._desk.beat(self._group_beat())

    def _group_beat(self) -> GroupBeat:
        return GroupBeat(healthy=self._is_healthy, message=self._state, stats=self._coordinator.stats())

    @property
    def _is_healthy(self) -> bool:
        return self._failure is None and self._shards.is_ready and not self._stopping

    @property
    def _state(self) -> str:
        if self._failure is not None:
            return str(self._failure)
        if self._stopping:
            return "the group is stopping"
        if not self._shards.is_ready:
            return f"{self._shards.num_ready} of {self._shards.num_shards} shards are ready"
        return "ready"

    def _lose(self, rank: int, text: str) -> None:
        self._give_up(f"shard {rank} is lost: {text}")

    def _give_up(self, cause: str) -> None:
        if self._failure is None:  # the first cause; the other shards then fail in their collectives
            logger.error(cause)
            self._fail(UnavailableError(cause))

    def _fail(self, error: LatentrayError) -> None:
        self._failure = error
        self._desk.fail(error)
        self._beat()
        self._ended.set()

    def _take_stop(self) -> None:
        self._stopping = True

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        # A full pipe means that the loop is awake already, a closed one that it has ended.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")
