"""The text of a completion as it may be shown: never the beginning of a stop string."""

from collections.abc import Sequence

import tokenizers

from actors.detokenizer import IncrementalDetokenizer
from actors.requests import RequestUpdate


class TextStream:
    """Text of one request's updates. The coordinator detects stop strings; here only text is held back.

    All returned pieces, joined, are the completion's text, which ends before the stop string.
    """

    __slots__ = ("_detokenizer", "_held", "_stop")

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._held = ""

    def consume(self, update: RequestUpdate) -> str:
        """The text that an update makes certain; all that is left with the last update.

        A token that ends the stream by itself (EOS, a stop id) is counted, but is no text, as in vLLM.
        """
        if update.finish_reason is None:
            return self.push(update.token_ids)
        ended_by_token = update.finish_reason == "stop" and not isinstance(update.matched_stop, str)
        text = self.push(update.token_ids[:-1] if ended_by_token else update.token_ids)
        return text + self.finish(update.matched_stop)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is now certain and cannot be part of a stop string any more."""
        self._held += self._detokenizer.push(token_ids)
        certain = self._num_certain()
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self, matched_stop: int | str | None = None) -> str:
        """The rest, up to the stop string if one ended the stream."""
        text = self._held + self._detokenizer.finish()
        self._held = ""
        if isinstance(matched_stop, str) and (end := text.find(matched_stop)) >= 0:
            return text[:end]
        return text

    def _num_certain(self) -> int:
        """Characters before the first place where a stop string stands, or may be about to stand."""
        text = self._held
        first = len(text)
        for stop in self._stop:
            found = text.find(stop)
            if found >= 0:
                first = min(first, found)
            for start in range(max(0, len(text) - len(stop) + 1), first):
                if stop.startswith(text[start:]):
                    first = start
                    break
        return first
