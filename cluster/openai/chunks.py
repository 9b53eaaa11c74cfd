"""A streamed answer as OpenAI's chunks."""

from collections.abc import Sequence
from typing import Any

from cluster.openai.answers import answer_head, choice_logprobs
from cluster.openai.bodies import TextBody
from cluster.openai.chat_body import ChatBody
from cluster.openai.chat_message import Deltas, finish_reason
from cluster.outputs import CompletionOutput
from cluster.tokenizer.token_bytes import TokenBytes


class Chunks:
    """The chunks of one answer, each a JSON object; their texts, joined, are the whole answer's."""

    def __init__(
        self,
        body: TextBody,
        request_id: str,
        *,
        model: str,
        token_bytes: TokenBytes,
        deltas: Sequence[Deltas] = (),
    ) -> None:
        """deltas: of a chat's choices."""
        self._body = body
        self._deltas = deltas
        self._token_bytes = token_bytes
        self._head = answer_head(body, request_id, model=model)
        if isinstance(body, ChatBody):
            self._head["object"] = "chat.completion.chunk"
        self._offsets: dict[int, _Offsets] = {}
        """Of each choice."""

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """What comes before any token: whose turn it is, in a chat."""
        if not isinstance(self._body, ChatBody):
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk(index, {"delta": delta}) for index in range(num_choices)]

    def piece(self, part: CompletionOutput) -> list[dict[str, Any]]:
        """The chunk of what is new of one choice; [] where nothing can be shown yet."""
        logprobs = choice_logprobs(self._body, part, self._token_bytes, self._offsets_of(part))
        reason: str | None = part.finish_reason
        if isinstance(self._body, ChatBody):
            deltas = self._deltas[part.index]
            delta = deltas.push(part.text, is_last=reason is not None)
            reason = finish_reason(reason, has_calls=deltas.num_calls > 0)
            content: dict[str, Any] = {"delta": delta}
            has_news = bool(delta)
        else:
            content = {"text": part.text}
            has_news = bool(part.text)
        if not has_news and not reason and (logprobs is None or not part.token_ids):
            return []
        if reason is not None:
            content["stop_reason"] = part.stop_reason
        return [self._chunk(part.index, content, logprobs, reason)]

    def usage(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """The last chunk, with the totals."""
        return [self._head | {"choices": [], "usage": usage}]

    def _offsets_of(self, part: CompletionOutput) -> list[int] | None:
        if part.logprobs is None or isinstance(self._body, ChatBody):
            return None
        if part.index not in self._offsets:
            self._offsets[part.index] = _Offsets(self._token_bytes, self._body.skips_special_tokens)
        return self._offsets[part.index].push(part)

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._head | {"choices": [choice]} | ({"usage": None} if self._body.wants_usage else {})


class _Offsets:
    """Where the tokens of one choice begin in its text, part by part, each looked at a few times at most.

    Of a run of bytes that a later byte makes no text, what was told before it came stays as it was told.
    """

    def __init__(self, token_bytes: TokenBytes, skip_special_tokens: bool) -> None:
        self._token_bytes = token_bytes
        self._skips = skip_special_tokens
        self._start = 0
        """Characters before `_window`."""
        self._window: list[int] = []
        """Tokens whose characters may still change."""
        self._text = ""

    def push(self, part: CompletionOutput) -> list[int]:
        self._text += part.text
        self._window += part.token_ids
        text = self._text if part.finish_reason is not None else None
        offsets = self._token_bytes.offsets(
            self._window, text, skip_special_tokens=self._skips, start=self._start
        )
        settled = self._token_bytes.num_settled(
            self._window, skip_special_tokens=self._skips, start=self._start
        )
        if settled:
            self._start, self._window = self._start + settled, []
        return offsets[len(offsets) - len(part.token_ids) :]
