"""The text of a completion as it may be shown: never the beginning of a stop string."""

from collections.abc import Sequence

import tokenizers

from actors.detokenizer import IncrementalDetokenizer
from actors.requests import RequestUpdate
from actors.sampling_params import SamplingParams
from actors.stop_string import StopString


class TextStream:
    """Text of one completion. All returned pieces, joined, are its text, which ends before the stop string.

    Two ways in. `consume` takes the updates of a front end, from which the tokens of a stop string are held
    until it is decided: nothing is searched for. `push` and `finish` take ids from elsewhere, such as a
    server's stream, and hold text back themselves.
    """

    __slots__ = (
        "_begin",
        "_decided",
        "_detokenizer",
        "_held",
        "_include_stop",
        "_min_tokens",
        "_num_tokens",
        "_stop",
    )

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        """min_tokens: a stop string that ends in the text of as many tokens is text like any other.

        include_stop: the text ends after the stop string, or the token, that ended the stream.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple((text, StopString(text)) for text in stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._held = ""
        self._begin: int | None = None
        """Where in `_held` the first stop string stands that counts."""
        self._decided = 0
        """Characters of `_held` in which no stop string counts that ends there."""
        self._num_tokens = 0

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: tokenizers.Tokenizer) -> "TextStream":
        if not params.detokenize:
            return _NoText(tokenizer)
        return cls(
            tokenizer,
            stop=params.stop,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
        )

    def consume(self, update: RequestUpdate) -> str:
        """The text that an update makes certain; all that is left with the last update.

        A token that ends the stream by itself (EOS, a stop id) is counted, but is no text unless stops are
        included, as in vLLM.
        """
        push, ids, stop = self._detokenizer.push, update.token_ids, update.matched_stop
        if update.finish_reason is None:
            return push(ids)
        if isinstance(stop, str):  # it ends in the last token's text
            before = push(ids[:-1])
            text = before + push(ids[-1:])
            start = text.find(stop, max(len(before) - len(stop) + 1, 0))
            return text[: start + len(stop) * self._include_stop]
        ended_by_token = update.finish_reason == "stop" and not self._include_stop
        return push(ids[:-1] if ended_by_token else ids) + self._detokenizer.finish()

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is now certain and cannot be part of a stop string any more."""
        num_undecidable = min(max(self._min_tokens - self._num_tokens, 0), len(token_ids))
        self._num_tokens += len(token_ids)
        if num_undecidable:
            self._read(self._detokenizer.push(token_ids[:num_undecidable]), counts=False)
            self._decided = len(self._held)
        self._read(self._detokenizer.push(token_ids[num_undecidable:]), counts=True)
        certain = self._num_certain()
        text, self._held = self._held[:certain], self._held[certain:]
        self._decided = max(self._decided - certain, 0)
        if self._begin is not None:
            self._begin -= certain
        return text

    def finish(self, matched_stop: int | str | None = None) -> str:
        """The rest, up to the stop string if one ended the stream."""
        text = self._held + self._detokenizer.finish()
        self._held = ""
        if isinstance(matched_stop, str) and (start := self._find(text, matched_stop)) >= 0:
            return text[: start + len(matched_stop)] if self._include_stop else text[:start]
        return text

    def _find(self, text: str, stop: str) -> int:
        """Where a stop string that counts begins, or -1."""
        return text.find(stop, max(self._decided - len(stop) + 1, 0))

    def _read(self, text: str, *, counts: bool) -> None:
        """counts: whether a stop string may end in this text."""
        for stop, string in self._stop:
            end = string.push(text)
            if end and counts:
                begin = max(len(self._held) + end - len(stop), 0)
                self._begin = begin if self._begin is None else min(self._begin, begin)
        self._held += text

    def _num_certain(self) -> int:
        """Characters before the first place where a stop string stands, or may be about to stand."""
        undecided = max((string.num_matched for _, string in self._stop), default=0)
        certain = max(len(self._held) - undecided, 0)
        return certain if self._begin is None else min(certain, self._begin)


class _NoText(TextStream):
    """Of a request that wants token ids alone."""

    __slots__ = ()

    def consume(self, update: RequestUpdate) -> str:
        return ""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""
