"""Grammars of state slots: one matcher a live request, and the masks of a step's rows."""

import time

import numpy as np
from numpy.typing import NDArray

from actors.grammar.compiler import GrammarCompiler
from actors.grammar.matcher import SequenceMatcher
from actors.messages import SamplingSpec

Int64s = NDArray[np.int64]
Uint8s = NDArray[np.uint8]

MAX_ROW_S = 1.0
"""CPU time that a grammar may take for one row. A grammar can be written whose parse grows with every token:
it ends its own request, not the patience of others."""


class SlotGrammars:
    """Owner of the slots' matchers. Every rank has its own and, from the same tokens, comes to the same."""

    def __init__(self, compiler: GrammarCompiler, *, vocab_start: int, slice_size: int) -> None:
        self._compiler = compiler
        self._first_byte, self.first_bit = divmod(vocab_start, 8)
        self._num_bytes = -(-(self.first_bit + slice_size) // 8)
        self._matchers: dict[int, SequenceMatcher] = {}

    def admit(self, slot: int, spec: SamplingSpec) -> None:
        """The slot's request stands at its completion's beginning. Errors: any of the compiler's."""
        assert spec.structured_outputs is not None
        self._matchers[slot] = self._compiler.matcher(spec.structured_outputs, spec.grammar_end_ids)

    def release(self, slot: int) -> None:
        self._matchers.pop(slot, None)

    def append(self, slot: int, tokens: list[int]) -> None:
        """These tokens now belong to the completion. Errors: ValueError for one that is not legal."""
        if slot in self._matchers:
            self._matchers[slot].advance(tokens)

    def legal(self, slot: int, drafts: list[int]) -> Uint8s | None:
        """Bits from `first_bit` on of this rank's tokens that may follow the drafts; None: any may.

        Errors: TimeoutError for a grammar that takes too long over one row.
        """
        matcher = self._matchers.get(slot)
        if matcher is None:
            return None
        began = time.thread_time()
        bits = matcher.legal(drafts)
        if time.thread_time() - began > MAX_ROW_S:
            raise TimeoutError(f"the grammar takes more than {MAX_ROW_S:g} s for one token")
        if bits is None:
            return None
        own = np.zeros(self._num_bytes, np.uint8)  # padding columns lie beyond the vocabulary
        part = bits[self._first_byte : self._first_byte + self._num_bytes]
        own[: len(part)] = part
        return own
