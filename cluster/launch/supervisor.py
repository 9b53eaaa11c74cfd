"""Watches a running group from its driver: who ends before its time, of what, and who follows."""

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.exceptions

from actors.coordinator.group_state import (
    STEADY_S,
    Diagnosis,
    Evidence,
    GroupState,
    Phase,
    Symptom,
    back_off_s,
)
from cluster.launch.deaths import cause_of_death
from cluster.launch.members import Member
from cluster.launch.ray_session import RaySession
from kernels_integration.errors import CollectiveError, LatentrayError, UnavailableError

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_SETTLE_S = 0.3
_PING_TIMEOUT_S = 0.5
_CLOSED = "its connections were closed: its process, its node, or Ray's process (raylet) of its node is gone"
_OF_USE_S = 5.0
"""A coordinator that lived for so long has answered requests: no reason to wait before the next one."""


class Supervised(Protocol):
    """What is watched: a `RunningGroup`."""

    @property
    def members(self) -> Sequence[Member]:
        """The coordinator, then the shards by rank."""

    def log_of(self, member: Member) -> Path | None:
        """Its log file on its node; None: it has none."""

    def restart_shards(self, epoch: int, lost_rank: int | None = None) -> None: ...

    def replace_coordinator(self, epoch: int, cause: str) -> None: ...

    def tell_lost(self, reason: str) -> None: ...

    def end(self, reason: str) -> None: ...


class Supervisor:
    """Until `stop`, or until the group has failed; then `failure` says why, and the shards are ended.

    Ray reports a process that ended within milliseconds, and the coordinator is told. The coordinator decides
    what a loss means, and asks for the shards of the next epoch; of its own loss this thread decides.
    max_restarts: how often in a row a coordinator may be lost. timeout_s: a start that has waited for so long
    in vain is the last one. epoch: of the shards that there are.
    """

    def __init__(
        self,
        group: Supervised,
        *,
        session: RaySession,
        max_restarts: int,
        timeout_s: float,
        epoch: int = 0,
    ) -> None:
        self._timeout_s = timeout_s
        self.failure: str | None = None
        self._group = group
        self._session = session
        self._is_stopping = threading.Event()
        self._diagnosis = Diagnosis(settle_s=_SETTLE_S, clock=time.monotonic)
        self._max_restarts = max_restarts
        self._num_lost_coordinators = 0
        """In a row."""
        self._coordinator_since_s = time.monotonic()
        self._epoch = epoch
        self._cause = ""
        """Of the recovery that goes on."""
        self._change: GroupState | None = None
        """What the coordinator asks for."""
        self._lost_coordinator = ""
        """What it died of, when it is gone."""
        self._waiting: dict[Any, Member | None] = {}
        """Calls that end with a member's life; None: the coordinator's account of the group."""
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    @property
    def epoch(self) -> int:
        """The newest that has begun."""
        return self._epoch

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def tell(self, message: str) -> None:
        """What a recovery waits for: the group's health shows it."""
        if self._cause:
            self._group.members[0].ask("recovery_waits", f"{self._cause}; {message}")

    def _watch(self) -> None:
        self._attend()
        while self.failure is None and not self._is_stopping.is_set():
            if (why := self._session.failure) is not None:
                self.failure = why
                # Of a local Ray no call answers any more, but its processes would linger for a minute. With
                # them end the connections of front ends, so that nobody waits.
                self._session.abandon()
                self._group.tell_lost(why)
                return
            # For the first that ends; then whatever has ended with it, since one explains the other.
            ray.wait(list(self._waiting), timeout=_LOOK_S)
            done, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
            if self._is_stopping.is_set():
                return
            for reference in done:
                self._note(reference, self._waiting.pop(reference))
            if self._lost_coordinator:
                self._replace_coordinator()
            elif self._change is not None and self._change.phase is Phase.RECOVERING:
                self._recover(self._change)
            elif self._is_over:
                cause = self._diagnosis.cause
                assert cause is not None, "the coordinator said why"
                self._give_up(cause.text)

    @property
    def _is_over(self) -> bool:
        """The coordinator has ended the group, and the cause is as clear as it will get."""
        is_told = self._change is not None and self._change.is_over
        return is_told and (not self._waiting or time.monotonic() >= self._diagnosis.settles_at_s)

    def _attend(self) -> None:
        """Watch the members that there are now."""
        coordinator = self._group.members[0]
        self._change = None
        change = coordinator.ask("wait_change", self._epoch, group="watch")
        self._waiting = {change: None} | {member.run: member for member in self._group.members}

    def _note(self, reference: Any, member: Member | None) -> None:
        """One call has ended: the coordinator's account of the group, or the life of a member."""
        try:
            told = ray.get(reference)
        except ray.exceptions.RayError as error:
            if member is None:
                return  # the coordinator is gone, which its own call tells too
            if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, UnavailableError):
                self._look_after_coordinator()
                return
            if isinstance(error, ray.exceptions.RayTaskError):
                is_symptom = isinstance(error.cause, CollectiveError)
                evidence = Evidence.PEERS if is_symptom else Evidence.WORDS
            else:
                evidence = Evidence.PROCESS
            cause = cause_of_death(error, member, self._group.log_of(member))
        else:
            if member is None:
                self._change = told
                text = told.message if told.phase is Phase.FAILED else "the coordinator was stopped"
                if told.is_over:
                    self._diagnosis.add(Symptom(Evidence.WORDS, -1, text))
                return
            evidence, cause = Evidence.CONNECTION, "it ended before it was told to"
        rank = self._group.members.index(member) - 1
        text = f"{member} is lost: {cause}"
        self._diagnosis.add(Symptom(evidence, rank, text))
        if rank < 0:
            self._lost_coordinator = text
        elif evidence is Evidence.PROCESS:
            self._group.members[0].ask("shard_lost", rank, cause, self._epoch)

    def _look_after_coordinator(self) -> None:
        """A shard has lost its connection to it. Ray tells at once of a process that ended, but of a node, or
        of its raylet, after a quarter of a minute."""
        coordinator = self._group.members[0]
        try:
            ray.get(coordinator.ask("ping"), timeout=_PING_TIMEOUT_S)
        except ray.exceptions.RayError:
            if not ray.wait([coordinator.run], timeout=_SETTLE_S)[0]:
                self._waiting.pop(coordinator.run, None)
                self._lost_coordinator = f"{coordinator} is lost: {_CLOSED}"
                self._diagnosis.add(Symptom(Evidence.PEERS, -1, self._lost_coordinator))

    def _recover(self, change: GroupState) -> None:
        """Start what the coordinator waits for; of what fails in that it is told, and decides again."""
        self._epoch, self._cause = change.epoch, change.cause
        self._diagnosis.clear()
        logger.warning("epoch %d begins: %s", change.epoch, change.cause)
        coordinator, start_s = self._group.members[0], time.monotonic()
        try:
            if not self._is_stopping.wait(back_off_s(change.num_in_vain)):
                self._group.restart_shards(change.epoch, change.lost_rank)
        except (LatentrayError, ray.exceptions.RayError) as error:
            logger.warning("epoch %d did not begin: %s", change.epoch, error)
            text = f"the shards could not be started again: {error}"
            if time.monotonic() - start_s > self._timeout_s:
                coordinator.ask("give_up", f"{change.cause}; {text}")
            else:
                coordinator.ask("shard_lost", -1, text, self._epoch)
        finally:
            self._cause = ""
        self._attend()

    def _replace_coordinator(self) -> None:
        """Or fail, when too many have gone in a row."""
        text, self._lost_coordinator = self._lost_coordinator, ""
        start_s = time.monotonic()
        lived_s, self._coordinator_since_s = start_s - self._coordinator_since_s, start_s
        self._num_lost_coordinators = 1 if lived_s > STEADY_S else self._num_lost_coordinators + 1
        if self._num_lost_coordinators > self._max_restarts:
            self._give_up(text)
            return
        self._epoch, self._cause = self._epoch + 1, text
        was_of_use = lived_s > _OF_USE_S
        if self._is_stopping.wait(0.0 if was_of_use else back_off_s(self._num_lost_coordinators)):
            return
        try:
            self._group.replace_coordinator(self._epoch, text)
        except (LatentrayError, ray.exceptions.RayError) as error:
            text = f"{text}; the next one could not be started: {error}"
            if time.monotonic() - start_s > self._timeout_s:
                self._give_up(text)
            else:
                self._lost_coordinator = text
            return
        self._recover(GroupState(num_shards=1, phase=Phase.RECOVERING, epoch=self._epoch, cause=text))

    def _give_up(self, text: str) -> None:
        """The group has failed for good."""
        self.failure = text
        self._group.end(text)
