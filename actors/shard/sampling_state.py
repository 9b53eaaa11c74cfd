"""Sampling parameters of all state slots, gathered into rows for the sampler."""

import logging

import numpy as np
from numpy.typing import NDArray

from actors.grammar.compiler import GrammarCompiler
from actors.messages import Admission
from actors.shard.boundary import Boundary
from actors.shard.slot_rules import Preceding, SlotRules
from kernels_integration.sampling import SamplingRows

logger = logging.getLogger(__name__)

Int64s = NDArray[np.int64]


class SamplingState:
    """Owner of each slot's sampling parameters, set at admission only, and of the history that they need."""

    def __init__(
        self,
        num_slots: int,
        *,
        vocab_start: int,
        slice_size: int,
        boundary: Boundary,
        compiler: GrammarCompiler | None = None,
    ) -> None:
        """vocab_start, slice_size: this rank's part of the vocabulary. compiler: of grammars."""
        self._boundary = boundary
        # In the precision of the request: what is legal there must not round to something else here.
        self._temperature = np.zeros(num_slots, np.float64)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float64)
        self._seed = np.zeros(num_slots, np.int64)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._rules = SlotRules(
            vocab_start=vocab_start, slice_size=slice_size, boundary=boundary, compiler=compiler
        )

    def admit(self, admission: Admission) -> None:
        """Replace the slot's parameters. A request whose own cannot be applied draws nothing."""
        try:
            self._take(admission)
        except Exception:
            logger.exception("the sampling parameters of slot %d cannot be applied", admission.slot)
            self._rules.fail(admission.slot)

    def _take(self, admission: Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self._seed[slot] = np.uint64(admission.seed).astype(np.int64)
        self._num_logprobs[slot] = sampling.num_logprobs
        self._rules.admit(admission)

    def append(self, slot: int, tokens: NDArray[np.int32]) -> None:
        """These tokens of the slot's request were accepted: rules of later rows count them."""
        self._rules.append(slot, tokens)

    def seeds(self, slots: Int64s) -> Int64s:
        """[b] bit patterns of uint64."""
        return self._seed[slots]

    def rows(
        self, slots: Int64s, positions: Int64s, *, preceding: Preceding | None = None, with_logprobs: bool
    ) -> SamplingRows:
        """Rows that draw the tokens at `positions` (index in prompt + completion) for `slots`.

        preceding: drafts between a slot's accepted tokens and each row; None: there are none.
        """
        num_logprobs = self._num_logprobs[slots] if with_logprobs else np.full(len(slots), -1)
        asked = np.flatnonzero(num_logprobs >= 0)
        up = self._boundary.up
        return SamplingRows(
            temperature=up(self._temperature[slots]),
            top_k=up(self._top_k[slots]),
            top_p=up(self._top_p[slots]),
            min_p=up(self._min_p[slots]),
            seed=up(self._seed[slots]),
            position=up(positions),
            rules=self._rules.gather(slots, positions, preceding),
            num_logprobs=int(num_logprobs[asked].max()) if len(asked) else -1,
            logprob_rows=up(asked),
        )
