"""Token ids whose text may begin a stop string wait here until that is decided.

The coordinator detects stop strings; this only delays. Without it a client would have been given
(and could have shown) the first half of a stop string before the coordinator sees the second half.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

from actors.detokenizer import IncrementalDetokenizer


class HoldBack:
    """Counts the tokens of one stream that are safe to send.

    A token is safe when the text up to its end has no suffix that begins a stop string; what follows an
    unsafe token waits too, so order is kept. Linear in the text but for the length of the longest stop.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._longest = max(map(len, stop))
        # An unfinished UTF-8 sequence has no text yet; it can only begin a stop that starts outside ASCII.
        self._hold_unfinished = any(not s[0].isascii() for s in stop)
        self._tail = ""
        self._ends: list[int] = []
        """Of each held token: characters of text up to its end, counted from the stream's start."""
        self._num_chars = 0

    def push(self, token_ids: Sequence[int]) -> int:
        """Take new tokens; return how many of the held ones, oldest first, are safe now."""
        unfinished = 0
        for token_id in token_ids:
            text = self._detokenizer.push((token_id,))
            self._num_chars += len(text)
            self._tail = (self._tail + text)[-self._longest :]
            self._ends.append(self._num_chars)
            unfinished = 0 if text else unfinished + 1
        undecided_from = self._num_chars - self._undecided()
        num_safe = sum(1 for end in self._ends if end <= undecided_from)
        if self._hold_unfinished:
            num_safe = min(num_safe, len(self._ends) - unfinished)
        del self._ends[:num_safe]
        return num_safe

    def _undecided(self) -> int:
        """Length of the longest suffix of the text that is a proper beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(self._tail) + 1))
                if self._tail.endswith(stop[:length])
            ),
            default=0,
        )
