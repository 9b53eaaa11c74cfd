"""Collectives between threads of one process: the transport of tests and of a group without Ray."""

import threading
from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from kernels_integration.collectives.reduction import sum_in_rank_order
from kernels_integration.errors import CollectiveError

_Operation = Literal["all_reduce", "all_gather", "all_to_all", "reduce_scatter"]


class InProcessCollectives:
    """One member of a set whose ranks are threads of this process.

    The last rank to arrive does the work for all, the others sleep: one wake-up per rank and operation.
    Every rank gets a result of its own that it may overwrite. The owner of a rank that fails closes its
    member, from any thread; that, a timeout and unequal calls break the set for good: every rank, waiting
    or not yet arrived, gets CollectiveError.
    """

    def __init__(self, meeting: "_Meeting", rank: int) -> None:
        self._meeting = meeting
        self._rank = rank

    @classmethod
    def create(cls, size: int, *, timeout_s: float = 60.0) -> list[Self]:
        """The members of a new set, in rank order; an operation fails `timeout_s` after its first arrival."""
        meeting = _Meeting(size, timeout_s)
        return [cls(meeting, rank) for rank in range(size)]

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._meeting.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else self._meeting.exchange(self._rank, "all_reduce", x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0) if self.size == 1 else self._meeting.exchange(self._rank, "all_gather", x)

    def all_to_all(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else self._meeting.exchange(self._rank, "all_to_all", x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return x[0] if self.size == 1 else self._meeting.exchange(self._rank, "reduce_scatter", x)

    def close(self) -> None:
        self._meeting.break_up(f"rank {self._rank} has closed its collectives")


class _Meeting:
    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._arrived: dict[int, tuple[_Operation, Tensor]] = {}
        self._results: list[Tensor | None] = [None] * size
        # A gate is a lock that its rank has taken: taking it again sleeps until another thread opens it.
        self._gates = [threading.Lock() for _ in range(size)]
        for gate in self._gates:
            gate.acquire()
        self._broken: str | None = None

    def exchange(self, rank: int, operation: _Operation, x: Tensor) -> Tensor:
        with self._lock:
            if self._broken is not None:
                raise CollectiveError(self._broken)
            if rank in self._arrived:
                raise CollectiveError(
                    f"rank {rank} calls {operation} while its last call still waits; use one thread per rank"
                )
            self._arrived[rank] = (operation, x)
            complete = len(self._arrived) == self.size
        if complete:
            self._serve_all(rank)
        elif not self._gates[rank].acquire(timeout=self._timeout_s):
            self._time_out(rank, operation)
        result, self._results[rank] = self._results[rank], None
        if result is None:
            raise CollectiveError(self._broken or "the set of ranks is broken")
        return result

    def break_up(self, reason: str) -> None:
        with self._lock:
            self._break_up(reason)

    def _serve_all(self, last_rank: int) -> None:
        # The inputs stay untouched meanwhile: their ranks sleep.
        try:
            results = _results([self._arrived[rank] for rank in range(self.size)])
        except Exception as error:
            self.break_up(f"a collective failed: {error}")
            return
        with self._lock:
            if self._broken is not None:
                return
            self._arrived.clear()
            self._results[:] = results
            for rank, gate in enumerate(self._gates):
                if rank != last_rank:
                    gate.release()

    def _time_out(self, rank: int, operation: _Operation) -> None:
        with self._lock:
            if self._results[rank] is not None:
                self._gates[rank].acquire()
                return
            missing = [r for r in range(self.size) if r not in self._arrived]
            self._break_up(f"rank {rank} waited {self._timeout_s} s in {operation} for ranks {missing}")

    def _break_up(self, reason: str) -> None:
        if self._broken is None:
            self._broken = reason
            for rank in self._arrived:
                if self._gates[rank].locked():
                    self._gates[rank].release()
            self._arrived.clear()


def _results(calls: Sequence[tuple[_Operation, Tensor]]) -> list[Tensor]:
    operation, first = calls[0]
    for rank, (other_operation, x) in enumerate(calls):
        if (other_operation, x.shape, x.dtype) != (operation, first.shape, first.dtype):
            raise CollectiveError(
                f"rank 0 calls {operation} of {tuple(first.shape)} {first.dtype}, rank {rank} "
                f"{other_operation} of {tuple(x.shape)} {x.dtype}; every rank must make equal calls"
            )
    inputs = [x for _, x in calls]
    if operation == "all_to_all":
        return [torch.stack([x[rank] for x in inputs]) for rank in range(len(inputs))]
    if operation == "reduce_scatter":
        return [sum_in_rank_order([x[rank] for x in inputs]) for rank in range(len(inputs))]
    result = sum_in_rank_order(inputs) if operation == "all_reduce" else torch.stack(inputs)
    return [result, *(result.clone() for _ in calls[1:])]
