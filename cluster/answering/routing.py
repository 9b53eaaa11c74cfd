"""Which group takes a sequence: a pure function of what is known of each."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """One group, as a front end sees it now."""

    healthy: bool
    num_own: int = 0
    """Sequences of this front end there: exact and of this moment."""
    num_reported: int = 0
    """Sequences of all front ends there, as of its last heartbeat."""
    kv_usage: float = 0.0
    """Part of its KV blocks in use, 0 to 1, as of its last heartbeat."""

    @property
    def num_sequences(self) -> int:
        """What has been sent since the heartbeat is in the one number, what others have sent in the other."""
        return max(self.num_own, self.num_reported)


def least_loaded(groups: Sequence[GroupSnapshot]) -> int | None:
    """The healthy group with the fewest sequences, of equals the one with the emptiest cache; else None."""
    healthy = [number for number, group in enumerate(groups) if group.healthy]
    return min(healthy, key=lambda number: _load(groups[number]), default=None)


def _load(group: GroupSnapshot) -> tuple[int, int, float]:
    return group.num_sequences, group.num_own, group.kv_usage
