"""The newest requests that ended with an error, for the status page. Never their texts."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kernels_integration.errors import MAX_SHOWN

NUM_KEPT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    time_s: float
    """Unix time."""
    request_id: str
    code: str
    field: str
    """The parameter at fault; "" where there is none."""


class RecentFailures:
    """The last NUM_KEPT, newest first."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._failures: deque[Failure] = deque(maxlen=NUM_KEPT)

    def __iter__(self) -> Iterator[Failure]:
        return iter(self._failures)

    def add(self, request_id: str, code: str, field: str = "") -> None:
        """What comes from a client is cut to what a log line shows."""
        failure = Failure(
            time_s=self._clock(), request_id=request_id[:MAX_SHOWN], code=code, field=field[:MAX_SHOWN]
        )
        self._failures.appendleft(failure)
