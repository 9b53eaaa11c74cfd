"""Steps that the shards have and have not reported: their one owner, and the check of their reports."""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.acceptance import standard_tokens
from actors.coordinator.schedule import Schedule, ScheduledRows
from actors.messages import StepOutput
from kernels_integration.errors import ProtocolError

STEPS_IN_FLIGHT = {"sync": 1, "deferred": 2}
"""Sync: the next step is chosen when the last has reported. Deferred: while the last one runs."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """What is kept of a step until its report."""

    step: int
    schedule: Schedule
    k: NDArray[np.uint8]
    """[V] drafts of the verifies, then a zero for each final chunk: what yields tokens, in order."""
    slots: NDArray[np.int32]
    """[V]"""
    sent_at: float

    @property
    def num_requests(self) -> int:
        return len(self.schedule.verifies) + len(self.schedule.chunks)


class StepsInFlight:
    """The steps of this epoch that have yet to report, oldest first; at most max_steps."""

    def __init__(self, max_steps: int) -> None:
        self.epoch = 0
        self._max_steps = max_steps
        self._steps: deque[StepInFlight] = deque()
        self._newest: StepInFlight | None = None

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """A step must report before the next one is sent."""
        return len(self._steps) >= self._max_steps

    @property
    def schedules(self) -> list[Schedule]:
        return [step.schedule for step in self._steps]

    def age_s(self, now: float) -> float:
        """Since the oldest was sent; 0 without one."""
        return max(0.0, now - self._steps[0].sent_at) if self._steps else 0.0

    def begin_epoch(self, epoch: int) -> None:
        """New shards know nothing of these steps. Errors: ProtocolError unless epochs go up."""
        if epoch <= self.epoch:
            raise ProtocolError(f"epoch {epoch} cannot follow epoch {self.epoch}; epochs only go up")
        self.epoch = epoch
        self._steps.clear()
        self._newest = None

    @property
    def newest_rows(self) -> list[ScheduledRows]:
        """Of the steps in flight; without one of the last step, whose work may go on behind its report."""
        steps = list(self._steps) or [step for step in (self._newest,) if step is not None]
        return [rows for step in steps for rows in (*step.schedule.verifies, *step.schedule.chunks)]

    def sent(self, step: StepInFlight) -> None:
        self._steps.append(step)
        self._newest = step

    def reported(self, output: StepOutput) -> StepInFlight:
        """The oldest step, which this report answers; it is no longer in flight.

        Errors: ProtocolError for a report that does not answer it; then the step stays in flight.
        """
        oldest = self._steps[0] if self._steps else None
        if oldest is None or output.epoch != self.epoch or output.step != oldest.step:
            expected = f"epoch {self.epoch} step {oldest.step}" if oldest else "nothing"
            raise ProtocolError(
                f"the shards reported epoch {output.epoch} step {output.step}; expected {expected}"
            )
        num_drafts = int(oldest.k.sum())
        expected_sizes = (num_drafts, num_drafts + len(oldest.k), oldest.num_requests)
        num_tokens = len(output.tokens)
        if output.rejection is not None:
            num_tokens = len(output.rejection.residual) + len(output.rejection.bonus)
        sizes = (len(output.drafts), num_tokens, len(output.length))
        if sizes != expected_sizes:
            raise ProtocolError(
                f"step {oldest.step}: the shards reported {sizes} drafts, tokens and lengths; "
                f"expected {expected_sizes}"
            )
        return self._steps.popleft()


def judged_tokens(step: StepInFlight, output: StepOutput) -> NDArray[Any]:
    """Standard rejection sampling: the shards' own decision about the drafts, repeated."""
    assert output.rejection is not None
    requests = [rows.request for rows in step.schedule.verifies]
    # Where a request has ended or was preempted since, nobody looks at its tokens.
    positions = [len(request.tokens) for request in requests]
    seeds = [request.request.seed for request in requests]
    final_chunks = [0] * (len(step.k) - len(requests))  # they have no drafts
    return standard_tokens(
        output.drafts,
        output.rejection,
        step.k,
        seeds=np.array(seeds + final_chunks, np.uint64).astype(np.int64),
        positions=np.array(positions + final_chunks, np.int64),
    )
