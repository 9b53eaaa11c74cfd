"""Proposed and accepted drafts by position, counted before a stop cuts the run."""

from itertools import accumulate


class AcceptanceCounters:
    """Counts of one coordinator's life."""

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_verifies = 0
        self.last_k: tuple[int, ...] = ()
        """Of the newest step with verifies: how many proposed 0, 1, 2, ... drafts."""
        # [n]: verifies that proposed, or accepted, exactly n drafts.
        self._proposed = [0] * (num_speculative_tokens + 1)
        self._accepted = [0] * (num_speculative_tokens + 1)

    def add(self, num_proposed: int, num_accepted: int) -> None:
        self.num_verifies += 1
        self._proposed[num_proposed] += 1
        self._accepted[num_accepted] += 1

    @property
    def proposed(self) -> tuple[int, ...]:
        """Verifies that proposed a draft at position 1, 2, ..."""
        return _at_least(self._proposed)

    @property
    def accepted(self) -> tuple[int, ...]:
        return _at_least(self._accepted)


def _at_least(exactly: list[int]) -> tuple[int, ...]:
    """[i]: the counts of i + 1 and more."""
    return tuple(accumulate(reversed(exactly[1:])))[::-1]
