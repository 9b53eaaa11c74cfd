"""A sequence's place in its grammar: behind the committed tokens, and for a moment behind drafts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import xgrammar

Uint8s = NDArray[np.uint8]


class SequenceMatcher:
    """Says which tokens may follow. A pure function of the committed tokens and the drafts behind them.

    Where the grammar is complete an end of text is legal, and behind an end of text nothing else. Behind a
    draft that the grammar does not allow any token is: such a row decides nothing, as the target's own token
    before it is another.
    """

    def __init__(
        self, matcher: "xgrammar.GrammarMatcher", *, end_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        self._matcher = matcher
        num_words = -(-vocab_size // 32)
        self._words: NDArray[np.int32] = np.zeros((1, num_words), np.int32)
        self._bits: Uint8s = self._words[0].view(np.uint8)
        self._ends = _bits_of(end_token_ids, num_words)
        self._drafts: list[int] = []
        """Behind the committed tokens."""
        self._num_accepted = 0
        """Drafts that the grammar has taken: all, or those before the first that it does not allow."""

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens are committed. Errors: ValueError for one that the grammar does not allow here."""
        self._go_behind(tokens)
        refused = len(tokens) - self._num_accepted
        self._drafts, self._num_accepted = [], 0
        if refused and not self._matcher.is_terminated():
            raise ValueError(f"the grammar does not allow token {tokens[-refused]} here")

    def accepts(self, token: int) -> bool:
        """Whether the parse itself goes on with this token."""
        self._go_behind([token])
        return self._num_accepted == 1

    def legal(self, drafts: Sequence[int]) -> Uint8s | None:
        """Bits, by token id, least significant first, of what may follow committed tokens and drafts; None:
        anything. The caller copies them: the next call may write them anew.
        """
        self._go_behind(drafts)
        if self._matcher.is_terminated():
            return self._ends
        if self._num_accepted < len(drafts):
            return None
        self._matcher.fill_next_token_bitmask(self._words)
        return self._bits

    def _go_behind(self, drafts: Sequence[int]) -> None:
        """From where the matcher stands: the rows of a verify differ by one draft each."""
        common = 0
        while common < min(len(drafts), len(self._drafts)) and drafts[common] == self._drafts[common]:
            common += 1
        if self._num_accepted > common:
            self._matcher.rollback(self._num_accepted - common)
            self._num_accepted = common
        for token in drafts[common:] if self._num_accepted == common else ():
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                break
            self._num_accepted += 1
        self._drafts = list(drafts)


def _bits_of(token_ids: Sequence[int], num_words: int) -> Uint8s:
    bits = np.zeros(num_words * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little")
