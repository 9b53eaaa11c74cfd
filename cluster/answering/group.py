"""Groups as a front end sees them: hand a sequence over, be told what becomes of it."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.requests import Request, RequestUpdate, SequenceKey
from actors.stats import GroupStats
from cluster.answering.admission import QueueSnapshot
from cluster.answering.group_queue import GroupQueue
from cluster.answering.routing import GroupSnapshot, SeenPrompts, beginnings_of, best_group
from kernels_integration.errors import UnavailableError

_LOOK_S = 0.02
Deliver = Callable[[RequestUpdate | Exception], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Why a group takes no requests though it could."""

    reason: str
    """In words, with what ends it."""
    returns: bool = False
    """It serves again soon by itself: worth waiting for, as a group that recovers is."""


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
        self._drained: dict[Group, Drained] = {}
        self._weights: Counter[Group] = Counter()

    def __iter__(self) -> Iterator[Group]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def healthy(self) -> bool:
        """One of them can produce a token of a new request now."""
        return any(map(self.is_open, self._members))

    def drain(self, group: Group, drained: Drained) -> None:
        """It takes no sequences from now on; those that it has run on."""
        self._drained[group] = drained

    def undrain(self, group: Group) -> None:
        self._drained.pop(group, None)

    def weights_of(self, group: Group) -> int:
        """Whose number it has answers as it does: a stream goes on at such a group alone."""
        return self._weights[group]

    def set_weights(self, group: Group, weights: int) -> None:
        self._weights[group] = weights

    def num_sequences_of(self, group: Group) -> int:
        """Of this front end."""
        return self._num_sequences[group]

    def message_of(self, group: Group) -> str:
        """Why it takes no requests."""
        drained = self._drained.get(group)
        return group.message if drained is None else drained.reason

    def is_open(self, group: Group) -> bool:
        """It takes new requests."""
        return group.healthy and group not in self._drained

    def _is_awaited(self, group: Group) -> bool:
        drained = self._drained.get(group)
        return group.is_recovering if drained is None else drained.returns

    @property
    def message(self) -> str:
        """Why those that are not healthy are not."""
        if len(self._members) == 1:
            return self.message_of(self._members[0])
        unhealthy = [
            f"group {number}: {self.message_of(group)}"
            for number, group in enumerate(self._members)
            if not self.is_open(group)
        ]
        return "; ".join(unhealthy) if unhealthy else self._members[0].message

    def choose(self, request: Request, weights: int | None = None) -> Group:
        """The open group that is best for a request: see `routing`. Errors: UnavailableError.

        weights: of those with this number alone; None: of all.
        """
        if len(self._members) == 1 and weights is None:
            [only] = self._members
            if not self.is_open(only):
                raise UnavailableError(self.message)
            return only
        beginnings = beginnings_of(request.prompt_token_ids, request.cache_salt)
        chosen = best_group([self._snapshot(group, beginnings, weights) for group in self._members])
        if chosen is None:
            raise UnavailableError(self.message)
        self._seen[self._members[chosen]].add(beginnings)
        return self._members[chosen]

    def _fits(self, group: Group, weights: int | None) -> bool:
        return weights in (None, self._weights[group])

    def _snapshot(self, group: Group, beginnings: Sequence[int], weights: int | None) -> GroupSnapshot:
        stats, seen = group.stats or GroupStats(), self._seen[group]
        if stats.epoch != self._epochs[group]:
            self._epochs[group] = stats.epoch
            seen.clear()
        queue = self._queues[group].snapshot(stats)
        return GroupSnapshot(
            healthy=self.is_open(group) and self._fits(group, weights),
            num_own=self._num_sequences[group],
            # as if the others had sent as many each: together they would overrun a group that all like
            num_reported=stats.running + stats.waiting + queue.num_sent * queue.num_front_ends,
            kv_usage=stats.num_used_blocks / max(stats.num_kv_blocks, 1),
            overlap=seen.overlap(beginnings),
        )

    async def find(self, request: Request, patience_s: float, weights: int | None = None) -> Group:
        """As `choose`; while none can answer and some recover, wait for so long. Errors: UnavailableError."""
        deadline_s = time.monotonic() + patience_s
        while True:
            try:
                return self.choose(request, weights)
            except UnavailableError:
                is_in_vain = not any(
                    self._is_awaited(group) and self._fits(group, weights) for group in self._members
                )
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
            if self.is_open(group) and group.stats is not None
        ]
