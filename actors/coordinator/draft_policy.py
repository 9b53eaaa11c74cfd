"""How many drafts each request proposes in a step.

`num_speculative_tokens` is a ceiling. Every k travels in the step's message: all ranks of a group agree by
construction. What is chosen never changes a stream of coupled sampling, only its speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.config import GroupConfig
from actors.coordinator.acceptance_estimate import AcceptanceEstimate
from actors.coordinator.cost_model import CostModel, batch_bucket
from actors.coordinator.request_state import RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step that has reported tells of its verifies."""

    slots: NDArray[Any]
    """[V] state slots."""
    k: NDArray[np.int64]
    """[V] drafts proposed, descending."""
    accepted: NDArray[np.int64]
    """[V]"""
    has_chunks: bool
    seconds: float | None
    """Since the report before it; None where the shards were not busy all the time."""


class DraftPolicy(Protocol):
    """Asked for each verify; told before each step is chosen and when it has reported."""

    def begin_step(self, running: Sequence[RequestState]) -> None:
        """A step is chosen next. running: who has a state slot."""
        ...

    def num_drafts(self, request: RequestState) -> int:
        """At most num_speculative_tokens. The scheduler lowers it where it does not fit."""
        ...

    def admitted(self, slots: list[int]) -> None:
        """New requests have these state slots."""
        ...

    def observe(self, result: StepResult) -> None: ...


class StaticDrafts:
    """A function of the request alone."""

    def __init__(self, num_drafts: Callable[[RequestState], int]) -> None:
        self._num_drafts = num_drafts

    def begin_step(self, running: Sequence[RequestState]) -> None:
        pass

    def num_drafts(self, request: RequestState) -> int:
        return self._num_drafts(request)

    def admitted(self, slots: list[int]) -> None:
        pass

    def observe(self, result: StepResult) -> None:
        pass


class DraftTable(StaticDrafts):
    """k by the number of running requests: rows (first, last, k), ascending, beginning at 1.

    Between two rows and after the last one the row before holds on, as in vLLM's
    num_speculative_tokens_per_batch_size.
    """

    def __init__(self, table: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(lambda _: self._k)
        self._table = table
        self._k = 0

    def begin_step(self, running: Sequence[RequestState]) -> None:
        self._k = [k for first, _, k in self._table if first <= max(len(running), 1)][-1]


PROBE_STEPS = 5
"""The first has other costs (pending rows, steps in flight); the others are measured."""
PROBE_HORIZON_PER_K = 2000
"""Steps, times the ceiling, after which an untried K is taken to be twice as good as measured. A K that is
worse by the part g is tried every g * horizon steps: whatever g is, all of them together cost the part
PROBE_STEPS / PROBE_HORIZON_PER_K = 0.25 %."""
UNSEEN_AGE = 150
LEAST_PROBE_AGE = 64
MIN_GAIN = 1.03
"""A change must promise this much."""
MIN_TRIM_GAIN = 1.06
"""What different k for different requests must promise: mixtures are predicted, not measured."""
MIN_DWELL = 8
"""Steps between changes: leaving k = 0 costs the fill of all pending rows."""
PLAN_EVERY = 4


class DynamicDrafts:
    """Chooses the k that promises the most tokens a second, from measured acceptance and measured step times.

    For every ceiling K = 0..num_speculative_tokens: each request proposes as many of its K drafts as are
    likely enough to be worth a row (one draft's probability to be emitted, against what its row's time brings
    elsewhere); the sum of expected tokens over the predicted time is K's rate. The best K is taken when it
    beats the present one by MIN_GAIN.

    What is not tried is not measured. So the rate of a K counts for more the longer ago it ran at this batch
    size, and when that makes it the best one, it is probed for PROBE_STEPS steps by all requests. At each new
    batch size both ends, 0 and the ceiling, are measured once.
    Deterministic: the same results give the same choices.
    """

    def __init__(self, *, num_speculative_tokens: int, max_num_seqs: int) -> None:
        self._max_k = num_speculative_tokens
        self._horizon = PROBE_HORIZON_PER_K * num_speculative_tokens
        self.acceptance = AcceptanceEstimate(max_num_seqs, num_speculative_tokens)
        self.cost = CostModel(num_speculative_tokens)
        self.k = num_speculative_tokens
        """The present ceiling K."""
        self._probed_k: int | None = None
        self._probe_ends_at = 0
        self._num_steps = 0
        self._changed_at = 0
        self._planned_at = -PLAN_EVERY
        self._planned_size = 0
        self._bucket = -1
        self._tried_at: dict[int, NDArray[np.int64]] = {}
        """By batch bucket: the step at which each K last ran."""
        self._k_of_slot = [num_speculative_tokens] * max_num_seqs
        self._usual_k = num_speculative_tokens
        """Greatest k of the steps that are no probes."""
        self._last: tuple[int, bool] = (-1, True)
        """Greatest k of the last step that has reported, and whether it had chunks."""

    def begin_step(self, running: Sequence[RequestState]) -> None:
        if not running:
            return
        self._num_steps += 1
        is_probing = self._num_steps < self._probe_ends_at
        is_due = self._num_steps >= self._planned_at + PLAN_EVERY or len(running) != self._planned_size
        if is_due or (self._probed_k is not None and not is_probing):
            self._plan([request.slot for request in running], is_probing)

    def num_drafts(self, request: RequestState) -> int:
        return self._k_of_slot[request.slot]

    def admitted(self, slots: list[int]) -> None:
        self.acceptance.forget(slots)
        for slot in slots:
            self._k_of_slot[slot] = self.k if self._probed_k is None else self._probed_k

    def observe(self, result: StepResult) -> None:
        if not len(result.k):
            self._last = (-1, True)
            return
        self.acceptance.observe(result.slots, result.k, result.accepted)
        size, k = len(result.k), int(result.k[0])
        tried_at = self._tried_at.get(batch_bucket(size))
        if tried_at is not None:
            tried_at[k] = self._num_steps
        is_like_last = self._last == (k, False) and not result.has_chunks
        self._last = (k, result.has_chunks)
        if is_like_last and result.seconds is not None:
            is_usual = k == self._usual_k
            self.cost.observe(size, k, int(result.k.sum()), result.seconds, is_usual=is_usual)

    def _plan(self, slots: list[int], is_probing: bool) -> None:
        self._planned_at, self._planned_size = self._num_steps, len(slots)
        tried_at = self._enter(batch_bucket(len(slots)))
        if is_probing:
            self._give(slots, self._probed_k)
            return
        self._probed_k = None
        survival = self.acceptance.survival(slots)
        # A draft's row must bring more than the step's average second does.
        value_of_row = self._rate_of(survival, self.k, 0.0)[0] * self.cost.seconds_per_draft()
        plans = [self._better_plan(survival, k, value_of_row) for k in range(self._max_k + 1)]
        rates = np.array([rate for rate, _ in plans])
        ages = self._num_steps - tried_at
        best = int(rates.argmax())
        has_dwelt = self._num_steps >= self._changed_at + MIN_DWELL
        if has_dwelt and rates[best] > MIN_GAIN * rates[self.k]:
            self.k, self._changed_at = best, self._num_steps
        elif has_dwelt:
            self._probed_k = self._to_probe(survival, rates[self.k], ages)
            if self._probed_k is not None:
                self._probe_ends_at = self._num_steps + PROBE_STEPS
                self._give(slots, self._probed_k)
                return
        num_drafts = plans[self.k][1]
        self._usual_k = int(num_drafts.max())
        self._give(slots, num_drafts)

    def _better_plan(
        self, survival: NDArray[np.float64], k: int, least: float
    ) -> tuple[float, NDArray[np.int64]]:
        """Everybody drafts k, whose time is measured; or each only its likely drafts, where that promises
        more than the error of its predicted time.
        """
        alike, each = self._rate_of(survival, k, 0.0), self._rate_of(survival, k, least)
        return each if each[0] > MIN_TRIM_GAIN * alike[0] else alike

    def _rate_of(
        self, survival: NDArray[np.float64], k: int, least: float
    ) -> tuple[float, NDArray[np.int64]]:
        """Tokens a second with ceiling k, and each request's own k: drafts likelier than `least`."""
        considered = survival[:, :k]
        chosen = considered > least  # survival falls with the position: these are each request's first ones
        num_drafts: NDArray[np.int64] = chosen.sum(axis=1)
        tokens = len(survival) + float(considered.sum(where=chosen))
        k_max = int(num_drafts.max())
        return tokens / self.cost.predict(len(survival), k_max, int(num_drafts.sum())), num_drafts

    def _to_probe(self, survival: NDArray[np.float64], rate: float, ages: NDArray[np.int64]) -> int | None:
        """The K that, drafted by everybody, might beat the present rate by now."""
        for k in (self._max_k, 0):
            if ages[k] >= LEAST_PROBE_AGE and not self.cost.is_measured(len(survival), k):
                return k
        hopes = [
            self._rate_of(survival, k, 0.0)[0] * (1 + age / self._horizon) if age >= LEAST_PROBE_AGE else 0.0
            for k, age in enumerate(ages.tolist())
        ]
        hopes[self.k] = 0.0
        return int(np.argmax(hopes)) if max(hopes) > rate else None

    def _enter(self, bucket: int) -> NDArray[np.int64]:
        """The steps at which each K last ran at this batch size; time spent at others does not count."""
        if bucket not in self._tried_at:
            self._tried_at[bucket] = np.full(self._max_k + 1, self._num_steps - UNSEEN_AGE)
            self._changed_at = self._num_steps
        elif bucket != self._bucket:
            tried_at = self._tried_at[bucket]
            tried_at += self._num_steps - tried_at.max()
        self._bucket = bucket
        return self._tried_at[bucket]

    def _give(self, slots: list[int], num_drafts: int | NDArray[np.int64] | None) -> None:
        each = np.broadcast_to(np.asarray(num_drafts), len(slots)).tolist()
        for slot, k in zip(slots, each, strict=True):
            self._k_of_slot[slot] = k


def draft_policy_of(config: GroupConfig) -> DraftPolicy:
    """A table that was given, else the choice by measurement, else the ceiling."""
    ceiling = config.num_speculative_tokens
    if config.num_speculative_tokens_per_batch_size:
        return DraftTable(config.num_speculative_tokens_per_batch_size)
    if config.dynamic_speculative_decoding and ceiling:
        return DynamicDrafts(num_speculative_tokens=ceiling, max_num_seqs=config.max_num_seqs)
    return StaticDrafts(lambda _: ceiling)
