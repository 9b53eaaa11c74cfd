"""Where a step's time goes: named spans of host time, recorded by one thread."""

import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the coordinator records spans too, and has no use for torch
    from torch import Tensor

    from kernels_integration.collectives import Collectives

MAX_SPANS = 200_000
"""The newest are kept: about 15 MB."""


class Span(NamedTuple):
    """One stretch of work; spans nest. start_ns: the monotonic clock, which a node's processes share."""

    name: str
    start_ns: int
    duration_ns: int
    step: int | None = None
    """The step that it belongs to, where that is not clear from the span around it."""
    num_bytes: int = 0
    """What it had to read and write, and..."""
    num_flops: int = 0
    """...to compute, where it is an operation of a profiled backend."""


class Spans:
    """A recorder for one thread. Switched off it costs one call a span.

    with spans("attention"): ...
    with spans("step", 17): ...
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._off = nullcontext()

    def __call__(
        self, name: str, step: int | None = None, *, num_bytes: int = 0, num_flops: int = 0
    ) -> AbstractContextManager[None]:
        return _OpenSpan(name, step, (num_bytes, num_flops), self._spans) if self._is_on else self._off

    def take(self) -> list[Span]:
        """What was recorded since the last call, in the order of ending. Callable from another thread."""
        taken = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken


class _OpenSpan(AbstractContextManager[None]):
    __slots__ = ("_name", "_spans", "_start_ns", "_step", "_work")

    def __init__(self, name: str, step: int | None, work: tuple[int, int], spans: deque[Span]) -> None:
        self._name = name
        self._step = step
        self._work = work
        self._spans = spans

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        duration_ns = time.monotonic_ns() - self._start_ns
        self._spans.append(Span(self._name, self._start_ns, duration_ns, self._step, *self._work))


class SpannedCollectives:
    """Collectives whose operations, waiting included, are spans named "collectives"."""

    def __init__(self, comm: "Collectives", spans: Spans) -> None:
        self._comm = comm
        self._spans = spans

    @property
    def rank(self) -> int:
        return self._comm.rank

    @property
    def size(self) -> int:
        return self._comm.size

    def all_reduce(self, x: "Tensor") -> "Tensor":
        with self._spans("collectives"):
            return self._comm.all_reduce(x)

    def all_gather(self, x: "Tensor") -> "Tensor":
        with self._spans("collectives"):
            return self._comm.all_gather(x)

    def all_to_all(self, x: "Tensor") -> "Tensor":
        with self._spans("collectives"):
            return self._comm.all_to_all(x)

    def reduce_scatter(self, x: "Tensor") -> "Tensor":
        with self._spans("collectives"):
            return self._comm.reduce_scatter(x)

    def close(self) -> None:
        self._comm.close()
