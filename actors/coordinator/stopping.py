"""Where a completion ends: EOS, stop ids, stop strings, length - the first by position wins."""

from collections import deque
from collections.abc import Sequence

from tokenizers import Tokenizer

from actors.detokenizer import IncrementalDetokenizer
from actors.requests import FinishReason, Request
from actors.stop_string import StopString


class StopStringFinder:
    """Finds stop strings in the text of a completion (the prompt is never looked at).

    It also counts the tokens whose text may begin one: they are held until that is decided, and so is what
    follows them. Without it a reader would be shown the first half of a stop string.
    """

    __slots__ = ("_detokenizer", "_ends", "_holds_unfinished", "_num_chars", "_num_unfinished", "_stop")

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple((text, StopString(text)) for text in stop)
        # An unfinished UTF-8 sequence has no text yet; it can only begin a stop that starts outside ASCII.
        self._holds_unfinished = any(not text[0].isascii() for text in stop)
        self._num_unfinished = 0
        self._num_chars = 0
        self._ends: deque[int] = deque()
        """Of each held token: characters of text up to its end, counted from the completion's start."""

    @property
    def num_held(self) -> int:
        return len(self._ends)

    def push(self, token_id: int) -> str | None:
        """The stop string that ends in the text which this token makes certain.

        Of several, the one that ends first in the text, then the first of the list, as vLLM decides: so
        the choice does not depend on how the text is cut into tokens. One that ended in earlier text was
        refused there (min_tokens) and does not count again.
        """
        new = self._detokenizer.push((token_id,))
        self._num_chars += len(new)
        self._ends.append(self._num_chars)
        self._num_unfinished = 0 if new else self._num_unfinished + 1
        found, first_end = None, len(new) + 1
        for text, string in self._stop if new else ():
            end = string.push(new)
            if 0 < end < first_end:
                found, first_end = text, end
        decided = self._num_chars - max(string.num_matched for _, string in self._stop)
        num_unfinished = self._num_unfinished if self._holds_unfinished else 0
        while len(self._ends) > num_unfinished and self._ends[0] <= decided:
            self._ends.popleft()
        return found


class StopConditions:
    """One request's ends. Mutable: it reads the completion token by token, each token once."""

    __slots__ = (
        "_eos_ids",
        "_limit",
        "_num_undecided",
        "_stop_ids",
        "_strings",
        "_watched_ids",
        "finish_reason",
        "matched_stop",
    )

    def __init__(self, request: Request, *, limit: int, tokenizer: Tokenizer | None) -> None:
        """limit: tokens of prompt and completion together. tokenizer: needed where `params.stop` is given."""
        params = request.params
        self._limit = limit
        self._num_undecided = len(request.prompt_token_ids) + params.min_tokens
        self._eos_ids = frozenset() if params.ignore_eos else frozenset(request.eos_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._watched_ids = self._eos_ids | self._stop_ids
        self._strings: StopStringFinder | None = None
        if params.stop:
            assert tokenizer is not None
            self._strings = StopStringFinder(
                params.stop, tokenizer, skip_special_tokens=params.skip_special_tokens
            )
        self.finish_reason: FinishReason | None = None
        self.matched_stop: int | str | None = None

    @property
    def num_held(self) -> int:
        """The newest tokens that wait for the decision whether a stop string begins in them."""
        return 0 if self._strings is None or self.finish_reason is not None else self._strings.num_held

    def cut(self, num_tokens: int, emitted: Sequence[int]) -> int:
        """How many of `emitted` belong to the completion, that has `num_tokens` with its prompt so far.

        The token that completes a stop belongs to it. Sets finish_reason and matched_stop at an end.
        """
        if (
            self._strings is None
            and self._watched_ids.isdisjoint(emitted)
            and num_tokens + len(emitted) < self._limit
        ):
            return len(emitted)
        for i, token in enumerate(emitted):
            if self._ends_at(token, num_tokens + i + 1):
                return i + 1
        return len(emitted)

    def _ends_at(self, token: int, num_tokens: int) -> bool:
        may_stop = num_tokens > self._num_undecided  # a stop in the first min_tokens tokens does not count
        found = self._strings.push(token) if self._strings is not None else None
        if may_stop and token in self._eos_ids:
            self.finish_reason = "stop"
        elif may_stop and token in self._stop_ids:
            self.finish_reason, self.matched_stop = "stop", token
        elif may_stop and found is not None:
            self.finish_reason, self.matched_stop = "stop", found
        elif num_tokens >= self._limit:
            self.finish_reason = "length"
        return self.finish_reason is not None
