"""`input` and `instructions` of /v1/responses as the messages of a chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.chat.messages import require_only
from kernels_integration.errors import InvalidRequestError, shown

_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


@dataclass(slots=True)
class Conversation:
    """Messages, and where in the body each has come from."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    calls: dict[tuple[int, int], str] = field(default_factory=dict)
    """Where calls have come from, by the message and the place in its tool_calls."""

    def add(self, message: dict[str, Any], place: str) -> None:
        self.messages.append(message)
        self.places.append(place)

    def turn(self, place: str) -> dict[str, Any]:
        """The message of the assistant that items of an answer belong to: the last one, or a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add({"role": "assistant", "content": ""}, place)
        return self.messages[-1]


def conversation(given: object, instructions: object) -> Conversation:
    """Errors: InvalidRequestError naming the item."""
    found = Conversation()
    if instructions is not None:
        if not isinstance(instructions, str):
            raise InvalidRequestError(
                f"instructions is {shown(instructions)}; it must be text", field="instructions"
            )
        found.add({"role": "system", "content": instructions}, "instructions")
    if isinstance(given, str):
        found.add({"role": "user", "content": given}, "input")
        return found
    if not isinstance(given, list) or not given:
        raise InvalidRequestError(
            f"input is {shown(given)}; it must be text or a non-empty list of items", field="input"
        )
    for index, item in enumerate(given):
        _add(found, item, f"input[{index}]")
    return found


_FIELDS: Mapping[str, tuple[str, ...]] = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("content", "summary"),
}
_OF_ANY = ("type", "id", "status")


def _add(found: Conversation, item: object, place: str) -> None:
    if not isinstance(item, Mapping):
        raise InvalidRequestError(f"{place} is {shown(item)}; it must be an object", field=place)
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind in _FIELDS:
        require_only(item, (*_OF_ANY, *_FIELDS[kind]), place, of=f"an item of type {kind}")
    match kind:
        case "message" if item.get("role") == "assistant":
            turn = found.turn(place)
            turn["content"] += _text(item.get("content"), f"{place}.content")
        case "message":
            text = _text(item.get("content"), f"{place}.content")
            found.add({"role": item.get("role"), "content": text}, place)
        case "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            calls = found.turn(place).setdefault("tool_calls", [])
            calls.append(call)
            found.calls[len(found.messages) - 1, len(calls) - 1] = place
        case "function_call_output":
            text = _text(item.get("output"), f"{place}.output")
            found.add({"role": "tool", "tool_call_id": item.get("call_id"), "content": text}, place)
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            if text := _text(parts, f"{place}.content"):
                turn = found.turn(place)
                turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        case _:
            raise InvalidRequestError(
                f"{place}.type is {shown(kind)}; it must be one of {', '.join(_ITEMS)}", field=f"{place}.type"
            )


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"{place} is {shown(content)}; it must be text, or a list of text parts", field=place
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if isinstance(part, Mapping) and kind in _TEXT_PARTS:
            key = "refusal" if kind == "refusal" else "text"
            require_only(part, ("type", key, "annotations", "logprobs"), f"{place}[{index}]")
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            raise InvalidRequestError(
                f"{place}[{index}] is {shown(part)}; only parts of text are supported, such as "
                '{"type": "input_text", "text": "..."}',
                field=f"{place}[{index}]",
            )
        texts.append(text)
    return "\n".join(texts)
