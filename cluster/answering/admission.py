"""Whether a request may join the queues of the cluster: a pure function of what is known of each group.

Every gateway decides alone. Each coordinator owns its group's queue and tells of it in its heartbeats; what a
gateway has sent since is known to it alone, so between two heartbeats each takes only its part of the room
that is left: the budget divided by the number of front ends. All of them together exceed a budget by no more
than one request each, and by what was on its way when a heartbeat was made.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from actors.stats import QueuePart

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_SAFETY = 1.25
"""Estimates are means: who is told to be in time should be."""
_PRIORITY_FACTOR = 2
"""Who is served before others may be queued beyond the budget that the others fill, up to so many of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of what waits in the cluster. 0: no bound. Completions count, of which a request has n."""

    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    max_tenant_share: float = 1.0
    """Of both budgets, what the requests of one tenant may take."""
    by_priority: bool = False
    """Whether who has a lower priority number is served first."""


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request would add to a queue."""

    num_requests: int
    """Its completions."""
    num_tokens: int
    """To be computed before their first tokens."""
    max_tokens: int
    """Of the longest completion."""
    tenant: str = ""
    priority: int = 0
    time_left_s: float | None = None
    """Until its deadline; None: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of the requests that a group has finished lately, means."""

    service_s: float
    """From a request's turn to its end."""
    num_tokens: float
    """Of its completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """One healthy group's queue: as of its newest heartbeat, and what this front end has sent since."""

    num_slots: int
    """Requests that run at once, at most."""
    num_running: int = 0
    queued: tuple[QueuePart, ...] = ()
    sent: tuple[QueuePart, ...] = ()
    """Not among `queued` yet."""
    num_front_ends: int = 1
    pace: Pace | None = None
    """None: nothing has finished yet."""
    num_free: int = field(init=False)
    """Requests that would not wait. One that waits although slots are free waits for memory."""
    num_sent: int = field(init=False)

    def __post_init__(self) -> None:
        """Both are asked for by every request of a cluster, for every group."""
        free = 0 if self.queued else max(0, self.num_slots - self.num_running)
        object.__setattr__(self, "num_free", free)
        object.__setattr__(self, "num_sent", _requests(self.sent))

    @property
    def departures_per_s(self) -> float:
        """How fast the queue moves while it is one; 0: nobody knows."""
        if self.pace is None or self.pace.service_s <= 0:
            return 0.0
        num_busy = self.num_running if self.queued else self.num_slots
        return max(num_busy, 1) / self.pace.service_s

    def wait_s(self, asked: Asked, *, by_priority: bool) -> float:
        """An estimate of how long a request would wait here for its turn; 0 where nobody knows."""
        num_ahead = _requests(_ahead(self.queued, asked, by_priority=by_priority))
        num_ahead += _requests(_ahead(self.sent, asked, by_priority=by_priority))
        num_waiting = num_ahead + asked.num_requests - self.num_free
        rate = self.departures_per_s
        return num_waiting / rate if num_waiting > 0 and rate else 0.0

    def own_s(self, asked: Asked) -> float:
        """How long it would run then, if it is as those before it, or stops at its max_tokens."""
        if self.pace is None:
            return 0.0
        return self.pace.service_s * min(1.0, asked.max_tokens / max(self.pace.num_tokens, 1.0))


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str
    retry_after_s: float


def refusal(asked: Asked, queues: Sequence[QueueSnapshot], limits: Limits) -> Refusal | None:
    """Why a request is not taken now, and when to ask again; None: it is.

    queues: of the groups that can answer; without any there is nothing to decide here.
    """
    if not queues:
        return None
    return _beyond_budgets(asked, queues, limits) or _too_late(asked, queues, limits)


def _beyond_budgets(asked: Asked, queues: Sequence[QueueSnapshot], limits: Limits) -> Refusal | None:
    num_front_ends = max(queue.num_front_ends for queue in queues)
    free = sum(queue.num_free for queue in queues) // num_front_ends
    if sum(queue.num_sent for queue in queues) + asked.num_requests <= free:
        return None
    queued = [part for queue in queues for part in queue.queued]
    sent = [part for queue in queues for part in queue.sent]
    budgets = (
        (_requests, asked.num_requests, limits.max_queued_requests, "requests", "max-queued-requests"),
        (_tokens, asked.num_tokens, limits.max_queued_tokens, "prompt tokens", "max-queued-tokens"),
    )
    ahead = _ahead(queued, asked, by_priority=limits.by_priority)
    ahead_sent = _ahead(sent, asked, by_priority=limits.by_priority)
    for count, num, budget, things, flag in budgets:
        is_shared = budget and limits.max_tenant_share < 1
        of_tenant = max(1, int(budget * limits.max_tenant_share)) if is_shared else 0
        for parts, own, bound, whose in (
            (ahead, ahead_sent, budget, ""),
            (queued, sent, _PRIORITY_FACTOR * budget, ""),
            (_of(queued, asked.tenant), _of(sent, asked.tenant), of_tenant, f" of tenant {asked.tenant!r}"),
        ):
            # Tokens of those that find a slot count until the next heartbeat tells that they have.
            num_own = max(0, count(own) - (free if count is _requests else 0))
            if _fits(num, num_own, count(parts), bound, num_front_ends):
                continue
            num_queued = count(parts) + num_own
            return Refusal(
                f"{num_queued} {things}{whose} are waiting, and {num} more would exceed what may wait here, "
                f"{bound // num_front_ends if num_queued <= bound else bound} (--{flag}"
                f"{', --max-tenant-share' if whose else ''}); ask again later",
                _retry_s(max(1, num_queued + num - bound) if count is _requests else 1, queues),
            )
    return None


def _fits(num: int, num_sent: int, num_queued: int, budget: int, num_front_ends: int) -> bool:
    """Whether `num` more are within this front end's part of the room; 0: there is no budget.

    One request that is larger than its part, or than the whole, is taken where nothing is before it.
    """
    if not budget or not (num_sent or num_queued):
        return True
    room = budget - num_queued
    return num_sent + num <= room // num_front_ends or (not num_sent and num <= room)


def _too_late(asked: Asked, queues: Sequence[QueueSnapshot], limits: Limits) -> Refusal | None:
    """A request that would wait for so long that its deadline passes. Without a queue it may always try."""
    if asked.time_left_s is None or any(q.num_sent + asked.num_requests <= q.num_free for q in queues):
        return None
    waits = [(queue.wait_s(asked, by_priority=limits.by_priority), queue) for queue in queues]
    wait_s, best = min(waits, key=lambda wait: wait[0])
    needed_s = _SAFETY * (wait_s + best.own_s(asked))
    if not wait_s or needed_s <= asked.time_left_s:
        return None
    return Refusal(
        f"the request would be answered within {needed_s:.3g} s, of that about {wait_s:.3g} s in the queue; "
        f"its deadline is in {asked.time_left_s:.3g} s: allow more time, or ask again later",
        min(max(needed_s - asked.time_left_s, _MIN_RETRY_S), _MAX_RETRY_S),
    )


def _retry_s(num_requests: int, queues: Sequence[QueueSnapshot]) -> float:
    """Until so many requests have left the queues."""
    rate = sum(queue.departures_per_s for queue in queues)
    return min(max(num_requests / rate, _MIN_RETRY_S), _MAX_RETRY_S) if rate else _MIN_RETRY_S


def _ahead(parts: Iterable[QueuePart], asked: Asked, *, by_priority: bool) -> list[QueuePart]:
    return [part for part in parts if not by_priority or part.priority <= asked.priority]


def _of(parts: Iterable[QueuePart], tenant: str) -> list[QueuePart]:
    return [part for part in parts if part.tenant == tenant]


def _requests(parts: Iterable[QueuePart]) -> int:
    return sum(part.num_requests for part in parts)


def _tokens(parts: Iterable[QueuePart]) -> int:
    return sum(part.num_tokens for part in parts)
