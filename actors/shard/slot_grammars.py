"""Grammars of state slots: one matcher a live request, and the masks of a step's rows."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from actors.grammar.compiler import GrammarCompiler
from actors.grammar.lane import Lane
from actors.grammar.matcher import SequenceMatcher
from actors.messages import SamplingSpec

Uint8s = NDArray[np.uint8]
T = TypeVar("T")

MAX_CALL_S = 1.0
"""CPU time that a grammar may take in a step. One can be written whose parse grows with every token, or whose
masks take minutes: it ends its own request, not the patience of others."""
MAX_COMPILE_S = 5.0
"""Front ends have seen it compile in less; here vocabularies may have to be read for it."""
GRANT_S = 2.0
"""CPU time that a grammar may take beyond TOKEN_S a token: masks are made when a state is first met."""
TOKEN_S = 0.05
"""Several times what a bounded string takes over 128 k tokens, and three drafts a token."""
MAX_LANES = 8
MAX_GIVEN_UP = 4
"""Calls that were given up and still run: while there are so many, no grammar is taken up."""


@dataclass(slots=True)
class _Sequence:
    """A request in its grammar. Only calls on its lane touch the matcher and the time."""

    lane: Lane
    made: "Future[SequenceMatcher]"
    appended: "list[Future[None]]" = field(default_factory=list)
    """Whose errors nobody has seen."""
    num_tokens: int = 0
    cpu_s: float = 0.0
    """Since it was made."""
    is_busy: bool = False
    """A call is running."""

    def timed(self, compute: Callable[[SequenceMatcher], T]) -> T:
        """Run on its lane. Errors: TimeoutError where the request has had its time."""
        if self.is_busy:  # what was given up still runs
            raise TimeoutError("an earlier call took too long")
        matcher = self.made.result()
        began, self.is_busy = time.thread_time(), True
        try:
            found = compute(matcher)
        finally:
            self.is_busy = False
        self.cpu_s += time.thread_time() - began
        if self.cpu_s > GRANT_S + TOKEN_S * self.num_tokens:
            raise TimeoutError(f"it took {self.cpu_s:.1f} s of CPU time for {self.num_tokens} tokens")
        return found


@dataclass(frozen=True, slots=True)
class Asked:
    """Masks that are being made."""

    sequence: _Sequence
    found: "Future[list[Uint8s | None]]"


class SlotGrammars:
    """Owner of the slots' matchers. Every rank has its own and, from the same tokens, comes to the same.

    Matchers are made, and follow the tokens, on threads beside the step, which waits for masks alone. What is
    wrong with a slot's grammar is told where its masks are.
    """

    def __init__(self, compiler: GrammarCompiler, *, vocab_start: int, slice_size: int) -> None:
        self._compiler = compiler
        self._first_byte, self.first_bit = divmod(vocab_start, 8)
        self._num_bytes = -(-(self.first_bit + slice_size) // 8)
        self._lanes = [Lane() for _ in range(min(torch.get_num_threads(), MAX_LANES))]
        self._sequences: dict[int, _Sequence] = {}

    def admit(self, slot: int, spec: SamplingSpec) -> None:
        """The slot's request stands at its completion's beginning.

        Errors: TimeoutError where too many grammars are still at work that were given up.
        """
        assert spec.structured_outputs is not None
        num_given_up = sum(lane.num_given_up for lane in self._lanes)
        if num_given_up >= MAX_GIVEN_UP:
            raise TimeoutError(f"{num_given_up} grammars that took too long are still at work")
        lane = self._lanes[slot % len(self._lanes)]
        lane.submit(self._compiler.prepare, cpu_s=float("inf"))
        make = partial(self._compiler.matcher, spec.structured_outputs, spec.grammar_end_ids)
        self._sequences[slot] = _Sequence(lane, lane.submit(make, cpu_s=MAX_COMPILE_S))

    def release(self, slot: int) -> None:
        self._sequences.pop(slot, None)

    def append(self, slot: int, tokens: list[int]) -> None:
        """These tokens now belong to the completion."""
        sequence = self._sequences.get(slot)
        if sequence is None or not tokens:
            return
        sequence.num_tokens += len(tokens)
        advance = partial(sequence.timed, lambda matcher: matcher.advance(tokens))
        sequence.appended.append(sequence.lane.submit(advance, cpu_s=MAX_CALL_S + TOKEN_S * len(tokens)))

    def ask(self, slot: int, drafts: Sequence[list[int]]) -> Asked:
        """Begin to make the masks of rows behind these drafts each."""
        sequence = self._sequences[slot]
        make = partial(sequence.timed, lambda matcher: [self._own(matcher.legal(row)) for row in drafts])
        return Asked(sequence, sequence.lane.submit(make, cpu_s=MAX_CALL_S))

    def answer(self, asked: Asked) -> list[Uint8s | None]:
        """For each row the bits, from `first_bit` on, of this rank's tokens that may follow; None: any may.

        Errors: any of the compiler's; ValueError where a token was appended that is not legal; TimeoutError
        for a grammar that takes too long.
        """
        sequence = asked.sequence
        sequence.lane.result(sequence.made)
        for advanced in sequence.appended:
            sequence.lane.result(advanced)
        sequence.appended.clear()
        return sequence.lane.result(asked.found)

    def _own(self, bits: Uint8s | None) -> Uint8s | None:
        if bits is None:
            return None
        own = np.zeros(self._num_bytes, np.uint8)  # padding columns lie beyond the vocabulary
        part = bits[self._first_byte : self._first_byte + self._num_bytes]
        own[: len(part)] = part
        return own
