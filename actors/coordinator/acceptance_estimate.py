"""How likely the drafts of each request hold, from what held so far."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]

_GROUP_STEPS, _REQUEST_STEPS = 256, 96
"""What lies further back counts less than 1 / e."""
_UNMEASURED_GROUP_STEPS, _UNMEASURED_REQUEST_STEPS = 64, 512
"""The same, for positions that nobody drafts, or that the request does not."""
_LEAST_GROUP_TRIALS = 16.0
"""Old knowledge keeps the weight of so many trials, and gives way to anything new."""
_GROUP_TRIALS_OF_REQUEST = 5.0
"""A request is taken to be like the group until it has told as much itself."""
_FIRST_GUESS, _FIRST_WEIGHT = 0.7, 4.0


class AcceptanceEstimate:
    """Conditional acceptance by draft position: of drafts whose predecessors held, the part that holds.

    Counts decay. A request that no longer proposes is slowly forgotten, and judged like the group again: so
    that it gets another try.
    """

    def __init__(self, num_slots: int, num_speculative_tokens: int) -> None:
        self._positions = np.arange(1, num_speculative_tokens + 1)
        self._num_steps_without = 0
        """Steps without any drafts since the counts last decayed."""
        guess: Floats = np.full(num_speculative_tokens, _FIRST_WEIGHT)
        self._group_trials: Floats = guess
        self._group_held: Floats = _FIRST_GUESS * guess
        self._trials = np.zeros((num_slots, num_speculative_tokens))
        self._held = np.zeros((num_slots, num_speculative_tokens))

    def forget(self, slots: list[int]) -> None:
        """Other requests have these state slots now."""
        self._trials[slots] = self._held[slots] = 0.0

    def observe(self, slots: NDArray[np.int64], k: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        """A step's verifies proposed k and accepted so many drafts. Slots are distinct."""
        if not k.any():  # long stretches of k = 0 should cost nothing here either
            self._num_steps_without += 1
            return
        if self._num_steps_without:
            self._decay_unmeasured()
        reached = np.minimum(k, accepted + 1)[:, None] >= self._positions
        held = accepted[:, None] >= self._positions
        steps = np.where(reached.any(axis=0), _GROUP_STEPS, _UNMEASURED_GROUP_STEPS)
        keep = np.where(self._group_trials > _LEAST_GROUP_TRIALS, 1 - 1 / steps, 1.0)
        self._group_trials = self._group_trials * keep + reached.sum(axis=0)
        self._group_held = self._group_held * keep + held.sum(axis=0)
        keep_own = 1 - 1 / np.where(reached, _REQUEST_STEPS, _UNMEASURED_REQUEST_STEPS)
        self._trials[slots] = self._trials[slots] * keep_own + reached
        self._held[slots] = self._held[slots] * keep_own + held

    def _decay_unmeasured(self) -> None:
        num_steps, self._num_steps_without = self._num_steps_without, 0
        least = np.minimum(_LEAST_GROUP_TRIALS / self._group_trials, 1.0)
        keep = np.maximum((1 - 1 / _UNMEASURED_GROUP_STEPS) ** num_steps, least)
        self._group_trials = self._group_trials * keep
        self._group_held = self._group_held * keep
        keep_own = (1 - 1 / _UNMEASURED_REQUEST_STEPS) ** num_steps
        self._trials *= keep_own
        self._held *= keep_own

    def of_group(self) -> Floats:
        """[k_max]"""
        rates: Floats = self._group_held / self._group_trials
        return rates

    def survival(self, slots: list[int]) -> Floats:
        """[B, k_max]: the probability that all of a request's first 1, 2, ... drafts hold."""
        prior = _GROUP_TRIALS_OF_REQUEST
        held = self._held[slots] + prior * self.of_group()
        conditional = held / (self._trials[slots] + prior)
        survival: Floats = np.cumprod(conditional, axis=1)
        return survival
