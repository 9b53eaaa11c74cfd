"""An assistant's answer as OpenAI's messages and deltas have it."""

import uuid
from collections.abc import Sequence
from typing import Any

from cluster.chat.answer_parts import CallArguments, CallBegins, Content, Part, Reasoning
from cluster.chat.answer_reader import AnswerReader


class Deltas:
    """One choice's text as deltas, which joined are its message."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self.num_calls = 0

    def push(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """The delta of what is certain now; {} where nothing is."""
        parts = self._reader.push(text)
        if is_last:
            parts += self._reader.finish()
        return self._delta(parts)

    def _delta(self, parts: Sequence[Part]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for part in parts:
            match part:
                case Reasoning():
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
                case Content():
                    delta["content"] = delta.get("content", "") + part.text
                case CallBegins():
                    delta.setdefault("tool_calls", []).append(_call(self.num_calls, part.name))
                    self.num_calls += 1
                case CallArguments():
                    calls = delta.setdefault("tool_calls", [])
                    if not calls:
                        calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += part.text
        return delta


def whole_message(reader: AnswerReader, text: str) -> dict[str, Any]:
    """The message of a whole answer."""
    delta = Deltas(reader).push(text, is_last=True)
    calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
    message = {"role": "assistant", "content": delta.get("content") or (None if calls else "")}
    message["refusal"] = None
    if "reasoning_content" in delta:
        message["reasoning_content"] = delta["reasoning_content"]
    return message | {"tool_calls": calls} if calls else message


def finish_reason(reason: str | None, *, has_calls: bool) -> str | None:
    """As OpenAI names it: an answer that ends by itself and calls tools waits for their results."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def _call(index: int, name: str) -> dict[str, Any]:
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": ""},
    }
