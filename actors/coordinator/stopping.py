"""Where a completion ends: EOS, stop ids, stop strings, length - the first by position wins."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from actors.detokenizer import IncrementalDetokenizer
from actors.requests import FinishReason, Request


class StopStringFinder:
    """Finds stop strings in the text of a completion (the prompt is never looked at)."""

    __slots__ = ("_detokenizer", "_stop", "_tail", "_tail_len")

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._tail = ""
        self._tail_len = max(map(len, stop)) - 1

    def push(self, token_id: int) -> str | None:
        """The stop string that ends in the text which this token makes certain.

        Of several, the one that ends first in the text, then the first of the list, as vLLM decides: so
        the choice does not depend on how the text is cut into tokens.
        """
        new = self._detokenizer.push((token_id,))
        if not new:
            return None
        text, num_old = self._tail + new, len(self._tail)
        self._tail = text[-self._tail_len :] if self._tail_len else ""
        # What ended in earlier text was refused there (min_tokens) and does not count again.
        found = {s: text.find(s, max(0, num_old - len(s) + 1)) for s in self._stop}
        ends = {s: start + len(s) for s, start in found.items() if start >= 0}
        return min(ends, key=ends.__getitem__) if ends else None


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
