"""What one front end knows of one group's queue, between heartbeats too."""

import time
from collections.abc import Callable

from actors.requests import Request, SequenceKey
from actors.stats import GroupStats, QueuePart
from cluster.answering.admission import Pace, QueueSnapshot

_ON_ITS_WAY_S = 0.05
"""What was sent less long ago may not be in the figures that have just come."""
_AS_MUCH = 8
"""So many requests that have finished since the figures before count as much as all that went before."""


class GroupQueue:
    """The newest heartbeat's figures, and what this front end has sent since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[SequenceKey, tuple[float, QueuePart]] = {}
        self._stats: GroupStats | None = None
        self._pace = PaceMeter()
        self._snapshot: QueueSnapshot | None = None
        """Until something changes."""

    def sent(self, request: Request) -> None:
        """One sequence was submitted to the group."""
        num_tokens = len(request.prompt_token_ids)
        if request.progress is not None:
            num_tokens += len(request.progress.token_ids)
        part = QueuePart(
            tenant=request.tenant, priority=request.priority, num_requests=1, num_tokens=num_tokens
        )
        self._sent[request.key] = (self._clock(), part)
        self._snapshot = None

    def left(self, key: SequenceKey) -> None:
        """It has ended there."""
        if self._sent.pop(key, None) is not None:
            self._snapshot = None

    def snapshot(self, stats: GroupStats) -> QueueSnapshot:
        """stats: the group's newest."""
        if stats is self._stats and self._snapshot is not None:
            return self._snapshot
        if stats is not self._stats:
            self._stats = stats
            self._pace.observe(stats)
            told_s = self._clock() - _ON_ITS_WAY_S
            self._sent = {key: sent for key, sent in self._sent.items() if sent[0] > told_s}
        self._snapshot = QueueSnapshot(
            num_slots=stats.num_slots,
            num_running=stats.running,
            queued=stats.queue,
            sent=tuple(part for _, part in self._sent.values()),
            num_front_ends=max(stats.num_front_ends, 1),
            pace=self._pace.pace,
        )
        return self._snapshot


class PaceMeter:
    """The pace of one group, from the totals of its figures. Older requests count ever less."""

    def __init__(self) -> None:
        self.pace: Pace | None = None
        self._before = GroupStats()

    def observe(self, stats: GroupStats) -> None:
        """Note the newest figures; those of a coordinator that was started anew begin at zero."""
        before, phases = self._before, stats.phases
        num = phases.num_finished - before.phases.num_finished
        if num == 0:
            return
        self._before = stats
        if num < 0:
            return
        busy_s = phases.prefill_s + phases.decode_s - before.phases.prefill_s - before.phases.decode_s
        num_tokens = max(stats.num_generated_tokens - before.num_generated_tokens, 0)
        if self.pace is None:
            self.pace = Pace(service_s=busy_s / num, num_tokens=num_tokens / num)
            return
        weight = num / (num + _AS_MUCH)
        self.pace = Pace(
            service_s=self.pace.service_s + weight * (busy_s / num - self.pace.service_s),
            num_tokens=self.pace.num_tokens + weight * (num_tokens / num - self.pace.num_tokens),
        )
