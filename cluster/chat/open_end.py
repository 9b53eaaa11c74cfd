"""A chat whose last message the model goes on with: it is rendered with a mark at its end, and cut there."""

from collections.abc import Mapping, Sequence
from typing import Any

from kernels_integration.errors import InvalidRequestError, shown

_MARK = "\ue000continue here\ue001"
"""No template looks for it, and no message holds it."""


def left_open(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the mark. messages: as `checked_messages` returns them.

    Errors: InvalidRequestError when the last one is no text of the assistant, or holds the mark.
    """
    field = f"messages[{len(messages) - 1}]"
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or not last["content"]:
        raise InvalidRequestError(
            f"continue_final_message is true, and {field} is of role {shown(last['role'])}; it must be an "
            "assistant's message with text and without tool_calls",
            field="continue_final_message",
        )
    if any(_MARK in str(message) for message in messages):
        raise InvalidRequestError(
            f"messages hold the reserved text {_MARK!r}; leave it out", field="messages"
        )
    return [*map(dict, messages[:-1]), dict(last) | {"content": last["content"] + _MARK}]


def until_open_end(prompt: str) -> str:
    """The prompt up to the mark."""
    return prompt.partition(_MARK)[0]
