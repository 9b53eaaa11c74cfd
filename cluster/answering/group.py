"""Groups as a front end sees them: hand a sequence over, be told what becomes of it."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from actors.requests import Request, RequestUpdate, SequenceKey
from actors.stats import GroupStats
from cluster.answering.admission import QueueSnapshot
from cluster.answering.group_queue import GroupQueue
from cluster.answering.routing import GroupSnapshot, SeenPrompts, beginnings_of, best_group
from kernels_integration.errors import UnavailableError

_LOOK_S = 0.02
Deliver = Callable[[RequestUpdate | Exception], None]


class Group(Protocol):
    """One group, used in one event loop. `GroupClient` is it over sockets, `LocalGroup` in this process."""

    @property
    def healthy(self) -> bool:
        """A token can be produced now."""

    @property
    def is_recovering(self) -> bool:
        """Not healthy, but it works on that: it is worth waiting for."""

    @property
    def message(self) -> str:
        """Why it is not healthy, in words."""

    @property
    def stats(self) -> GroupStats | None:
        """The newest figures, None before the first."""

    async def connect(self) -> None:
        """Wait until it can be asked. Errors: UnavailableError."""

    def submit(self, request: Request, deliver: Deliver) -> None:
        """Begin one sequence. `deliver` is called in the loop with its updates, in order; the last has a
        finish_reason, or is the error that ended it.

        Errors: UnavailableError.
        """

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        """End sequences: nothing more is delivered, and their blocks are free within one step.

        Those that have ended are no error.
        """

    async def current_stats(self) -> GroupStats:
        """Figures as of now. Errors: UnavailableError."""

    async def close(self) -> None:
        """Leave the group; sequences that still run end with UnavailableError."""


class Groups:
    """All groups of a front end. A sequence goes to one of those that can answer."""

    def __init__(self, members: Iterable[Group]) -> None:
        self._members = tuple(members)
        self._num_sequences: Counter[Group] = Counter()
        self._seen = {group: SeenPrompts() for group in self._members}
        self._queues = {group: GroupQueue() for group in self._members}
        self._epochs: Counter[Group] = Counter()
        """Whose shards have seen the prompts."""

    def __iter__(self) -> Iterator[Group]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def healthy(self) -> bool:
        """One of them can produce a token now."""
        return any(group.healthy for group in self._members)

    @property
    def message(self) -> str:
        """Why those that are not healthy are not."""
        if len(self._members) == 1:
            return self._members[0].message
        unhealthy = [
            f"group {number}: {group.message}"
            for number, group in enumerate(self._members)
            if not group.healthy
        ]
        return "; ".join(unhealthy) if unhealthy else self._members[0].message

    def choose(self, request: Request) -> Group:
        """The healthy group that is best for a request: see `routing`. Errors: UnavailableError."""
        if len(self._members) == 1:
            [only] = self._members
            if not only.healthy:
                raise UnavailableError(self.message)
            return only
        beginnings = beginnings_of(request.prompt_token_ids, request.cache_salt)
        chosen = best_group([self._snapshot(group, beginnings) for group in self._members])
        if chosen is None:
            raise UnavailableError(self.message)
        self._seen[self._members[chosen]].add(beginnings)
        return self._members[chosen]

    def _snapshot(self, group: Group, beginnings: Sequence[int]) -> GroupSnapshot:
        stats, seen = group.stats or GroupStats(), self._seen[group]
        if stats.epoch != self._epochs[group]:
            self._epochs[group] = stats.epoch
            seen.clear()
        return GroupSnapshot(
            healthy=group.healthy,
            num_own=self._num_sequences[group],
            num_reported=stats.running + stats.waiting,
            kv_usage=stats.num_used_blocks / max(stats.num_kv_blocks, 1),
            overlap=seen.overlap(beginnings),
        )

    async def find(self, request: Request, patience_s: float) -> Group:
        """As `choose`; while none can answer and some recover, wait for so long. Errors: UnavailableError."""
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                return self.choose(request)
            except UnavailableError:
                is_in_vain = not any(group.is_recovering for group in self._members)
                if is_in_vain or time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(_LOOK_S)

    def took(self, group: Group, request: Request) -> None:
        """The group has this sequence more."""
        self._num_sequences[group] += 1
        self._queues[group].sent(request)

    def left(self, group: Group, key: SequenceKey) -> None:
        """The group has this sequence no more."""
        self._num_sequences[group] -= 1
        self._queues[group].left(key)

    def queues(self) -> list[QueueSnapshot]:
        """Of the groups that can answer."""
        return [
            self._queues[group].snapshot(group.stats)
            for group in self._members
            if group.healthy and group.stats is not None
        ]
