"""Chat messages as people send them, checked and flattened for the template."""

from collections.abc import Mapping, Sequence
from typing import Any

from kernels_integration.errors import InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Messages whose content is one text. Errors: InvalidRequestError naming the message."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            f"messages is {messages!r}; it must be a non-empty list of messages with role and content",
            field="messages",
        )
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def _checked_message(index: int, message: object) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{field} is a {type(message).__name__}; it must be an object with role and content", field=field
        )
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{field}.role is {role!r}; it must be one of {', '.join(ROLES)}", field=f"{field}.role"
        )
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of_part(field, part) for part in content)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise InvalidRequestError(
            f"{field}.content is {content!r}; it must be text, or a list of text parts",
            field=f"{field}.content",
        )
    return dict(message) | {"content": content}


def _text_of_part(field: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"{field}.content holds a part of type {kind!r}; only text parts are supported",
        field=f"{field}.content",
    )
