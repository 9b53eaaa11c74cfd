"""How far a rank has come with its weights: written by the thread that loads, read by others."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadState:
    """One moment. Picklable."""

    num_bytes: int
    """Read from files so far."""
    total_bytes: int
    """What this rank will have read when it is done; 0 until that is known."""
    seconds_left: float | None
    """At the rate so far; None before the first bytes."""


class LoadProgress:
    """Counts bytes; reads of `state` from another thread see a recent count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = 0.0
        self._total_bytes = 0
        self._num_bytes = 0

    def begin(self, total_bytes: int) -> None:
        self._start_s = self._clock()
        self._num_bytes = 0
        self._total_bytes = total_bytes

    def advance(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes

    def state(self) -> LoadState:
        done, total = self._num_bytes, self._total_bytes
        elapsed_s = self._clock() - self._start_s
        seconds_left = elapsed_s * (total - done) / done if done else None
        return LoadState(num_bytes=done, total_bytes=total, seconds_left=seconds_left)
