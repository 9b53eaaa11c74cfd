"""Chat messages as templates of all kinds can read them.

Templates disagree about two things that OpenAI's messages hold: whether the arguments of a tool call are
JSON text or an object, and how a message without content looks. The values here pass for both.
"""

import json
from collections.abc import Mapping
from typing import Any

from kernels_integration.errors import InvalidRequestError, shown


class NoContent(str):
    """The content of an assistant's message that only calls tools: an empty text for which `is none` holds.

    Some templates print it, some append it to texts, others choose their branch by `is none`.
    """

    __slots__ = ()


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's thoughts; templates read the first, or the second. As in transformers."""


def is_none(value: object) -> bool:
    return value is None or isinstance(value, NoContent)


class Arguments(dict[str, Any]):
    """A tool call's arguments: an object, whose text is the JSON that the client sent.

    GLM's and Qwen's templates loop over it or use tojson, DeepSeek-V3's appends it to a text.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __radd__(self, left: object) -> str:
        return left + self._text if isinstance(left, str) else NotImplemented

    def __add__(self, right: object) -> str:
        return self._text + right if isinstance(right, str) else NotImplemented


def template_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with such values; messages are those of `checked_messages`.

    Errors: InvalidRequestError for a tool call of another form than OpenAI's.
    """
    found = dict(message)
    if "tool_calls" in found and not found.get("content"):
        found["content"] = NoContent()
    for name in _REASONING:
        if name in found:
            found = {"thinking": found[name]} | found | {"reasoning_content": found[name]}
            break
    if "tool_calls" in found:
        found["tool_calls"] = [
            _template_call(call, f"messages[{index}].tool_calls[{i}]")
            for i, call in enumerate(checked_tool_calls(index, message))
        ]
    return found


def checked_tool_calls(index: int, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of an assistant's message, each with a function's name. Errors: InvalidRequestError."""
    calls = message.get("tool_calls") or []
    field = f"messages[{index}].tool_calls"
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{field} is {shown(calls)}; it must be a list", field=field)
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f"{field}[{i}] is {shown(call)}; it must be an object whose function "
                "has a name and arguments",
                field=f"{field}[{i}]",
            )
    return calls


def tool_arguments(call: Mapping[str, Any], field: str) -> Arguments:
    """The arguments of a checked call, which come as JSON text or as an object.

    Errors: InvalidRequestError when they are neither.
    """
    given = call["function"].get("arguments")
    if isinstance(given, Mapping):
        return Arguments(given, json.dumps(given, ensure_ascii=False))
    try:
        values = json.loads(given) if given else {}
    except (ValueError, TypeError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise InvalidRequestError(
            f"{field}.function.arguments is {shown(given)}; it must be a JSON object, or the text of one",
            field=f"{field}.function.arguments",
        )
    return Arguments(values, given or "{}")


def _template_call(call: Mapping[str, Any], field: str) -> dict[str, Any]:
    return dict(call) | {"function": dict(call["function"]) | {"arguments": tool_arguments(call, field)}}
