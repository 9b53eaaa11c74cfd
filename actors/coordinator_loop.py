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

import msgspec
import zmq

from actors.coordinator.group_state import STEADY_S, Diagnosis, Evidence, GroupState, Phase, Symptom
from actors.messages import StepInput, StepOutput
from actors.request_desk import RequestDesk, RequestPolicy
from actors.stats import GroupStats
from actors.transport import request_channel, step_channel
from actors.transport.request_channel import GroupBeat
from actors.transport.step_channel import ShardFailure, ShardGone
from kernels_integration.errors import CollectiveError, LatentrayError, ProtocolError, UnavailableError
from kernels_integration.spans import Spans

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""Beats are sent and silent peers are looked for this often."""
SILENCE_WARNING_S = 3.0
"""A shard that is not heard for so long is worth a line in the log."""
SETTLE_S = 0.3
"""Where several shards fail at once: how long the better account of the cause may take."""


class StepPolicy(RequestPolicy, Protocol):
    """What the loop drives: `actors.coordinator.Coordinator`, or a scripted one in tests."""

    @property
    def has_work(self) -> bool: ...

    @property
    def step_age_s(self) -> float: ...

    def schedule(self) -> StepInput | None: ...

    def process(self, output: StepOutput) -> None: ...

    def blame(self) -> bool: ...

    def restart(self, epoch: int) -> None: ...

    def fail_all(self, error: LatentrayError) -> None: ...

    def stats(self) -> GroupStats: ...


class CoordinatorLoop:
    """Drives one group until `stop`. A group that failed answers every request with UNAVAILABLE.

    `stop`, `shard_lost`, `recovery_waits`, `give_up` and `wait_change` may be called from any thread; `run`
    is called once. silence_s: a shard that is connected and was not heard for so long is lost all the same.
    stall_s: a step that takes longer makes the group unhealthy until it has reported.
    max_restarts: how often in a row the group may wait for new shards, which somebody else starts (who asks
    `wait_change`); requests are taken meanwhile, and streams go on with the new shards.
    recovers: what this coordinator follows on, if it is not the first: "the coordinator ... is lost".
    """

    def __init__(
        self,
        coordinator: StepPolicy,
        shards: step_channel.CoordinatorEnd,
        clients: request_channel.CoordinatorEnd,
        *,
        silence_s: float = 60.0,
        stall_s: float = 10.0,
        max_restarts: int = 0,
        recovers: str = "",
        tick_s: float = TICK_S,
        clock: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._shards = shards
        self._clients = clients
        self._silence_s = silence_s
        self._stall_s = stall_s
        self._tick_s = tick_s
        self._clock = clock
        self._spans = spans or Spans(is_on=False)
        self._desk = RequestDesk(coordinator, clients)
        self._state = GroupState(
            num_shards=shards.num_shards,
            epoch=shards.epoch,
            max_restarts=max_restarts,
            phase=Phase.RECOVERING if recovers else Phase.STARTING,
            cause=recovers,
        )
        self._changed = threading.Condition()
        self._serves_since_s = clock()
        self._num_restarts = 0
        """Of shards, in all."""
        self._lost_name = ""
        """Of the shard whose loss was the last."""
        self._diagnosis = Diagnosis(settle_s=SETTLE_S, clock=clock)
        self._warned: set[int] = set()
        """Silent shards that the log names already."""
        self._was_healthy = False
        self._next_tick_s = clock()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._poller = zmq.Poller()
        for source in (shards.socket, shards.lifelines, clients.socket, self._wake_reader):
            self._poller.register(source, zmq.POLLIN)

    def run(self) -> None:
        """Work until `stop`; then end live requests, let the shards go and close the channels."""
        try:
            while self._state.phase is not Phase.STOPPING:
                try:
                    self._turn()
                except Exception as error:
                    if self._state.is_over:
                        raise
                    logger.exception("the coordinator failed")
                    code = error.code if isinstance(error, LatentrayError) else LatentrayError.code
                    self._fail(f"the coordinator failed: {type(error).__name__}: {error}", code)
        finally:
            self._state = self._state.stopping()
            self._desk.fail(UnavailableError(self._state.message))
            self._beat()
            self._shards.stop_shards()
            self._shards.close()
            self._clients.close()
            self._wake_reader.close()
            self._tell_change()

    def stop(self) -> None:
        self._command(self._take_stop)

    def shard_lost(self, rank: int, text: str, epoch: int = 0) -> None:
        """The supervisor saw the process of an epoch's shard end; rank -1: the epoch could not begin."""
        self._command(lambda: self._take_loss(rank, text, epoch))

    def recovery_waits(self, text: str) -> None:
        """What the start of the next shards waits for, for people."""
        self._command(lambda: self._take_account(text))

    def give_up(self, text: str) -> None:
        """The next shards cannot be started: the group fails."""
        self._command(lambda: self._fail(text, UnavailableError.code))

    def wait_change(self, epoch: int, timeout_s: float | None = None) -> GroupState:
        """Wait until the shards of a later epoch are wanted, or the group is over; the state then."""
        with self._changed:
            self._changed.wait_for(lambda: self._state.epoch > epoch or self._state.is_over, timeout_s)
        return self._state

    @property
    def num_ready_shards(self) -> int:
        return self._shards.num_ready

    def _turn(self) -> None:
        with self._spans("idle"):
            ready = dict(self._poller.poll(math.ceil(self._wait_s() * 1000)))
        if self._wake_reader.fileno() in ready:
            self._take_commands()
        if self._shards.socket in ready or self._shards.lifelines.fileno() in ready:
            self._take_reports()
        if self._clients.socket in ready:
            self._desk.receive(self._group_beat, self._refusal)
        self._settle()
        self._schedule()
        with self._spans("updates"):
            self._desk.send_updates()
        if self._clock() >= self._next_tick_s or self._is_healthy != self._was_healthy:
            self._tick()

    def _wait_s(self) -> float:
        until_s = self._next_tick_s
        if self._diagnosis.is_open and not self._state.is_over:
            until_s = min(until_s, self._diagnosis.settles_at_s)
        return max(0.0, until_s - self._clock())

    def _take_commands(self) -> None:
        self._wake_reader.recv(4096)
        while not self._commands.empty():
            self._commands.get()()

    def _take_reports(self) -> None:
        for message in self._shards.receive():
            if isinstance(message, ShardGone):
                self._suspect(Evidence.CONNECTION, message.rank, "is lost: its connection was closed")
            elif isinstance(message, ShardFailure):
                is_symptom = message.code == CollectiveError.code
                evidence = Evidence.PEERS if is_symptom else Evidence.WORDS
                self._suspect(evidence, message.rank, f"failed: {message.text} [{message.code}]")
            elif self._state.is_serving:
                self._process(message)
        for rank in self._shards.ready_ranks - self._state.ready:
            self._state = self._state.shard_ready(rank, self._shards.epoch)
            if self._state.is_serving:
                self._serves_since_s = self._clock()

    def _process(self, output: StepOutput) -> None:
        try:
            self._coordinator.process(output)
        except ProtocolError as error:  # the coordinator has taken nothing of it
            self._shards.malformed(str(error))
        else:
            self._state = self._state.stepped()
            self._schedule()

    @property
    def _refusal(self) -> LatentrayError | None:
        """Why no request is taken now; None when they are, also those that wait for the next shards."""
        is_open = self._state.phase in (Phase.SERVING, Phase.RECOVERING)
        return None if is_open else _error_of(self._state)

    def _schedule(self) -> None:
        """Send steps until the coordinator wants a report first."""
        if not self._state.is_serving or self._diagnosis.is_open:
            return
        while self._coordinator.has_work and (step := self._coordinator.schedule()) is not None:
            with self._spans("send", step.step):
                self._shards.send(step)

    def _tick(self) -> None:
        self._next_tick_s = self._clock() + self._tick_s
        self._shards.tick()
        for rank in self._shards.silent(self._silence_s):
            text = f"is lost: it was not heard for {self._silence_s:g} s (heartbeat timeout)"
            self._suspect(Evidence.SILENCE, rank, text)
        silent = set(self._shards.silent(SILENCE_WARNING_S))
        for rank in silent - self._warned:
            logger.warning("%s has not been heard for %g s", self._shards.name_of(rank), SILENCE_WARNING_S)
        self._warned = silent
        if self._state.num_restarts and self._clock() - self._serves_since_s > STEADY_S:
            self._state = self._state.steady()
        self._desk.drop_lost()
        self._beat()

    def _beat(self) -> None:
        self._was_healthy = self._is_healthy
        self._desk.beat(self._group_beat())

    def _group_beat(self) -> GroupBeat:
        stats = msgspec.structs.replace(
            self._coordinator.stats(),
            step_age_s=self._coordinator.step_age_s,
            num_dropped_messages=self._shards.num_malformed
            + self._shards.num_refused
            + self._clients.num_ignored
            + self._clients.num_refused,
            epoch=self._state.epoch,
            num_restarts=self._num_restarts,
            num_front_ends=self._clients.num_clients,
        )
        return GroupBeat(healthy=self._is_healthy, message=self._message, stats=stats, phase=str(self._phase))

    @property
    def _phase(self) -> Phase:
        """As front ends see it: a loss that is not yet explained begins a recovery, or ends the group."""
        is_lost = self._state.is_serving and self._diagnosis.is_open
        return Phase.RECOVERING if is_lost and self._state.max_restarts else self._state.phase

    @property
    def _is_healthy(self) -> bool:
        return self._state.is_serving and not self._diagnosis.is_open and not self._is_stalled

    @property
    def _is_stalled(self) -> bool:
        return self._coordinator.step_age_s > self._stall_s

    @property
    def _message(self) -> str:
        cause = self._diagnosis.cause
        if self._state.is_serving and cause is not None:
            return cause.text
        if self._state.is_serving and self._is_stalled:
            return (
                f"the running step has taken {self._coordinator.step_age_s:.0f} s, longer than the step "
                f"timeout of {self._stall_s:g} s; a shard is stopped, starved or hangs"
            )
        return self._state.message

    def _suspect(self, evidence: Evidence, rank: int, text: str) -> None:
        """A sign that a shard is lost. The account of a loss that is known gets better by it."""
        if self._state.phase is Phase.STOPPING:
            return
        if rank >= 0:
            text = f"{self._shards.name_of(rank)} {text}"
        if self._diagnosis.add(Symptom(evidence, rank, text)):
            logger.error(text)
            if self._state.phase is Phase.FAILED:
                self._state = self._state.corrected(text)
                self._beat()

    def _take_loss(self, rank: int, text: str, epoch: int) -> None:
        if epoch == self._state.epoch:
            self._suspect(Evidence.PROCESS, rank, f"is lost: {text}" if rank >= 0 else text)
        elif epoch == self._state.epoch - 1 and rank == self._state.lost_rank:
            self._take_account(f"{self._lost_name} is lost: {text}")

    def _take_account(self, text: str) -> None:
        """Better words for what the group recovers from, or waits for."""
        self._state = self._state.corrected(text)
        self._beat()

    def _settle(self) -> None:
        """Draw the consequence of a loss once its cause is as clear as it will get."""
        cause = self._diagnosis.cause
        if cause is None or self._state.is_over or self._clock() < self._diagnosis.settles_at_s:
            return
        before = self._state
        # A shard that failed in a collective accuses another.
        lost_rank = None if cause.evidence is Evidence.PEERS or cause.rank < 0 else cause.rank
        self._lost_name = self._shards.name_of(cause.rank)
        counts = not self._coordinator.blame()
        self._state = before.shards_lost(cause.text, before.epoch, lost_rank, counts=counts)
        if self._state.phase is Phase.FAILED:
            self._end()
        else:
            self._num_restarts += 1
            self._diagnosis.clear()
            self._shards.begin_epoch(self._state.epoch)
            self._coordinator.restart(self._state.epoch)
            self._beat()
            self._tell_change()

    def _tell_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _fail(self, cause: str, code: str) -> None:
        self._state = self._state.failed(cause, code)
        self._end()

    def _end(self) -> None:
        """The group has failed: tell everybody."""
        error = _error_of(self._state)
        self._desk.fail(error)
        try:
            self._coordinator.fail_all(error)  # it counts them as running until then
        except Exception:
            logger.exception("the coordinator cannot end its requests")
        self._beat()
        self._tell_change()

    def _take_stop(self) -> None:
        self._state = self._state.stopping()

    def _command(self, command: Callable[[], None]) -> None:
        self._commands.put(command)
        # A full pipe means that the loop is awake already, a closed one that it has ended.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"\0")


def _error_of(state: GroupState) -> LatentrayError:
    """What requests are answered with in a state that serves none."""
    error = UnavailableError if state.code == UnavailableError.code else LatentrayError
    return error(state.message)
