"""Watches a running group from its driver: who ends before its time, of what, and what follows."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from actors.coordinator.group_state import Diagnosis, Evidence, Symptom
from cluster.launch.deaths import cause_of_death
from cluster.launch.members import Member
from cluster.launch.ray_session import RaySession
from kernels_integration.errors import CollectiveError

_LOOK_S = 0.2
_SETTLE_S = 0.3


class Supervisor:
    """Until `stop`, or until the group has failed; then `failure` says why, and the shards are ended.

    Ray reports a process that ended within milliseconds. When one shard dies the others fail with it, and the
    coordinator is told of the death that Ray saw; of a node that fell silent the coordinator knows first.
    log_of: the log file of a member on its node; None: it has none.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        log_of: Callable[[Member], Path | None],
        session: RaySession,
    ) -> None:
        self.failure: str | None = None
        self._members = list(members)
        self._log_of = log_of
        self._session = session
        self._is_stopping = threading.Event()
        self._diagnosis = Diagnosis(settle_s=_SETTLE_S, clock=time.monotonic)
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        coordinator, *shards = self._members
        failed = coordinator.ask("wait_failed", group="watch")
        waiting: dict[Any, Member | None] = {failed: None} | {member.run: member for member in self._members}
        while not self._is_stopping.is_set():
            if (why := self._session.failure) is not None:
                self.failure = why
                # No call of Ray's answers any more, but its processes would linger for a minute. With them
                # end the connections of front ends, so that nobody waits.
                self._session.abandon()
                return
            done, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=_LOOK_S)
            if self._is_stopping.is_set():
                return
            for reference in done:
                self._note(reference, waiting.pop(reference))
            cause = self._diagnosis.cause
            if cause is not None and (not waiting or time.monotonic() >= self._diagnosis.settles_at_s):
                self.failure = cause.text
                for shard in shards:  # they wait in a collective for the one that is gone
                    ray.kill(shard.actor)
                return

    def _note(self, reference: Any, member: Member | None) -> None:
        """One call has ended: the coordinator's account of the group, or the life of a member."""
        try:
            told = ray.get(reference)
        except ray.exceptions.RayError as error:
            if member is None:
                return  # the coordinator is gone, which its own call tells too
            if isinstance(error, ray.exceptions.RayTaskError):
                is_symptom = isinstance(error.cause, CollectiveError)
                evidence = Evidence.PEERS if is_symptom else Evidence.WORDS
            else:
                evidence = Evidence.PROCESS
            cause = cause_of_death(error, member, self._log_of(member))
        else:
            if member is None:
                text = told or "the coordinator was stopped"
                self._diagnosis.add(Symptom(Evidence.WORDS, -1, text))
                return
            evidence, cause = Evidence.CONNECTION, "it ended before it was told to"
        rank = self._members.index(member) - 1
        self._diagnosis.add(Symptom(evidence, rank, f"{member} is lost: {cause}"))
        if rank >= 0 and evidence is Evidence.PROCESS:
            self._members[0].ask("shard_lost", rank, cause)
