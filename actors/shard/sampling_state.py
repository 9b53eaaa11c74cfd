"""Sampling parameters of all state slots, gathered into rows for the sampler."""

import numpy as np
import torch
from numpy.typing import NDArray

from actors.messages import Admission
from kernels_integration.sampling import SamplingRows

Int64s = NDArray[np.int64]


class SamplingState:
    """Owner of each slot's sampling parameters; set at admission only."""

    def __init__(self, num_slots: int) -> None:
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float32)
        self._min_p = np.zeros(num_slots, np.float32)
        self._seed = np.zeros(num_slots, np.int64)
        self._num_logprobs = np.full(num_slots, -1, np.int64)

    def admit(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = max(sampling.top_k, 0)
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = np.uint64(admission.seed).astype(np.int64)
        self._num_logprobs[slot] = sampling.num_logprobs

    def rows(self, slots: Int64s, positions: Int64s, *, with_logprobs: bool) -> SamplingRows:
        """Rows that draw the tokens at `positions` (index in prompt + completion) for `slots`."""
        return SamplingRows(
            temperature=torch.from_numpy(self._temperature[slots]),
            top_k=torch.from_numpy(self._top_k[slots]),
            top_p=torch.from_numpy(self._top_p[slots]),
            min_p=torch.from_numpy(self._min_p[slots]),
            seed=torch.from_numpy(self._seed[slots]),
            position=torch.from_numpy(positions),
            num_logprobs=int(self._num_logprobs[slots].max()) if with_logprobs and len(slots) else -1,
        )
