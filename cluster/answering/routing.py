"""Which group takes a request: a pure function of what is known of each group."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

MAX_LEAD = 4
"""So many sequences more than the least loaded group may have the one that knows a prompt's beginning."""
_CHUNK = 64
"""Tokens; a beginning is remembered in whole chunks."""
_MAX_CHUNKS = 64
"""Of one prompt: more shared tokens make no difference to the choice."""
_MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """One group, as a front end sees it now."""

    healthy: bool
    num_own: int = 0
    """Sequences of this front end there: exact and of this moment."""
    num_reported: int = 0
    """Sequences of all front ends there, as of its last heartbeat, and an estimate of what came since."""
    kv_usage: float = 0.0
    """Part of its KV blocks in use, 0 to 1, as of its last heartbeat."""
    overlap: int = 0
    """Chunks of the prompt's beginning that it has seen, and may have in its prefix cache."""

    @property
    def num_sequences(self) -> int:
        """Its own are exact, but the others' are not among them."""
        return max(self.num_own, self.num_reported)


def best_group(groups: Sequence[GroupSnapshot]) -> int | None:
    """Of the healthy groups, but for those that are MAX_LEAD sequences ahead, the one that knows most of the
    prompt; of equals the least loaded, then the one with the emptiest cache. None: none is healthy.
    """
    healthy = [number for number, group in enumerate(groups) if group.healthy]
    if not healthy:
        return None
    least = min(groups[number].num_sequences for number in healthy)
    near = [number for number in healthy if groups[number].num_sequences <= least + MAX_LEAD]
    return min(near, key=lambda number: _order(groups[number]))


def _order(group: GroupSnapshot) -> tuple[int, int, int, float]:
    return -group.overlap, group.num_sequences, group.num_own, group.kv_usage


class SeenPrompts:
    """Beginnings of the prompts that one group was sent, the newest; a guess at what its cache holds."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def overlap(self, beginnings: Sequence[int]) -> int:
        """How many of a prompt's beginnings, from the shortest on, were sent."""
        return next((n for n, key in enumerate(beginnings) if key not in self._seen), len(beginnings))

    def add(self, beginnings: Sequence[int]) -> None:
        for key in beginnings:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _MAX_REMEMBERED:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        """Its cache is empty: it has new shards."""
        self._seen.clear()


def beginnings_of(prompt: Sequence[int], cache_salt: str | None) -> list[int]:
    """A number for each beginning of whole chunks, shortest first. Equal ones of another salt differ."""
    found: list[int] = []
    key = hash(cache_salt)
    for end in range(_CHUNK, min(len(prompt), _CHUNK * _MAX_CHUNKS) + 1, _CHUNK):
        key = hash((key, tuple(prompt[end - _CHUNK : end])))
        found.append(key)
    return found
