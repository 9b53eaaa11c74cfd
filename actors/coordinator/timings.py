"""Where time goes: of steps on the coordinator and the shards, and of requests by phase."""

from collections.abc import Callable
from dataclasses import dataclass

from actors.requests import SequenceKey
from actors.stats import PhaseTimes


@dataclass(slots=True)
class _Phases:
    submitted_at: float
    admitted_at: float | None = None
    first_token_at: float | None = None


class Timings:
    """Sums of one coordinator's life, in seconds.

    A request is queued until its first admission, in prefill until its first token, then it decodes until it
    ends. Only requests that finish count; preemption and its waits are part of the phase they fall into.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._live: dict[SequenceKey, _Phases] = {}
        self._busy_since: float | None = None
        self._num_finished = 0
        self._queue_s = self._prefill_s = self._decode_s = 0.0
        self.schedule_s = self.step_s = self.process_s = 0.0

    def submitted(self, key: SequenceKey) -> None:
        self._live[key] = _Phases(self._clock())

    def admitted(self, key: SequenceKey) -> None:
        phases = self._live[key]
        if phases.admitted_at is None:
            phases.admitted_at = self._clock()

    def first_token(self, key: SequenceKey) -> None:
        self._live[key].first_token_at = self._clock()

    def finished(self, key: SequenceKey) -> PhaseTimes:
        """The request's own times, which the sums hold from now on."""
        phases = self._live[key]
        assert phases.admitted_at is not None
        assert phases.first_token_at is not None
        own = PhaseTimes(
            num_finished=1,
            queue_s=phases.admitted_at - phases.submitted_at,
            prefill_s=phases.first_token_at - phases.admitted_at,
            decode_s=self._clock() - phases.first_token_at,
        )
        self._num_finished += 1
        self._queue_s += own.queue_s
        self._prefill_s += own.prefill_s
        self._decode_s += own.decode_s
        return own

    def ended(self, key: SequenceKey) -> None:
        """Finished or not."""
        del self._live[key]

    def step_reported(self, sent_at: float, reported_at: float, *, goes_on: bool) -> float | None:
        """The seconds that the shards spent on this step; None if they had been idle before it.

        From report to report: in deferred mode a step is sent long before it begins, and in sync mode what
        the coordinator does between steps is part of what a step costs. goes_on: there is more to do, so
        that the next step's time begins here.
        """
        self.step_s += reported_at - sent_at
        seconds = None if self._busy_since is None else reported_at - self._busy_since
        self._busy_since = reported_at if goes_on else None
        return seconds if seconds and seconds > 0 else None

    def interrupted(self) -> None:
        """The shards are new: no step's time begins before the next report."""
        self._busy_since = None

    def phases(self) -> PhaseTimes:
        return PhaseTimes(
            num_finished=self._num_finished,
            queue_s=self._queue_s,
            prefill_s=self._prefill_s,
            decode_s=self._decode_s,
        )
