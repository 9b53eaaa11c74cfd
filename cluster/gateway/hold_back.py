"""Token ids whose text may begin a stop string wait here until that is decided.

The coordinator detects stop strings; this only delays. Without it a client would have been given
(and could have shown) the first half of a stop string before the coordinator sees the second half.
"""

from bisect import bisect_right
from collections.abc import Sequence

from tokenizers import Tokenizer

from actors.detokenizer import IncrementalDetokenizer


class HoldBack:
    """Counts the tokens of one stream that are safe to send.

    A token is safe when the text up to its end has no suffix that begins a stop string; what follows an
    unsafe token waits too, so order is kept. Linear in the text, for stops of any length.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = [_Beginning(s) for s in stop]
        # An unfinished UTF-8 sequence has no text yet; it can only begin a stop that starts outside ASCII.
        self._hold_unfinished = any(not s[0].isascii() for s in stop)
        self._ends: list[int] = []
        """Of each held token: characters of text up to its end, counted from the stream's start."""
        self._num_chars = 0

    def push(self, token_ids: Sequence[int]) -> int:
        """Take new tokens; return how many of the held ones, oldest first, are safe now."""
        unfinished = 0
        for token_id in token_ids:
            text = self._detokenizer.push((token_id,))
            self._num_chars += len(text)
            for stop in self._stops:
                stop.push(text)
            self._ends.append(self._num_chars)
            unfinished = 0 if text else unfinished + 1
        undecided_from = self._num_chars - max(stop.length for stop in self._stops)
        num_safe = bisect_right(self._ends, undecided_from)
        if self._hold_unfinished:
            num_safe = min(num_safe, len(self._ends) - unfinished)
        del self._ends[:num_safe]
        return num_safe


class _Beginning:
    """How much of one stop string the text ends with, as it grows (Knuth, Morris and Pratt's automaton).

    `length` is that of the longest suffix of the text which is a proper beginning of the string.
    """

    __slots__ = ("_borders", "_text", "length")

    def __init__(self, text: str) -> None:
        self._text = text
        self._borders = [0]
        """[i]: length of the longest proper suffix of text[: i + 1] that begins it; grown when needed."""
        self.length = 0

    def push(self, more: str) -> None:
        text = self._text
        for character in more:
            while self.length and text[self.length] != character:
                self.length = self._border(self.length)
            self.length += text[self.length] == character
            if self.length == len(text):
                self.length = self._border(self.length)

    def _border(self, length: int) -> int:
        """Of the first `length` characters."""
        text, borders = self._text, self._borders
        while len(borders) < length:
            border, character = borders[-1], text[len(borders)]
            while border and text[border] != character:
                border = borders[border - 1]
            borders.append(border + (text[border] == character))
        return borders[length - 1]
