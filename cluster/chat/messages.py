"""Chat messages and tools as people send them, checked and brought to one form.

Clients spell "nothing" as null, [], "" or by leaving a field out, and templates tell these apart by chance:
here all four are the last.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.frontend.token_checks import require_text
from kernels_integration.errors import InvalidRequestError, kind_of, shown

ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Messages whose content is one text. Errors: InvalidRequestError naming the message."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            f"messages is {shown(messages)}; it must be a non-empty list of messages with role and content",
            field="messages",
        )
    return [_checked_message(i, message) for i, message in enumerate(messages)]


def checked_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """Tools in one form; None where there are none. Errors: InvalidRequestError."""
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
        raise InvalidRequestError(
            f"tools is {shown(tools)}; it must be a list of objects of type function", field="tools"
        )
    return [_checked_tool(tool) for tool in tools] if tools else None


def _checked_tool(tool: Any) -> Any:
    """A tool or a call of one, its function's fields included; what is inside arguments and parameters is
    the client's own."""
    if not isinstance(tool, Mapping):
        return tool
    given = _without_nothing(tool)
    if isinstance(function := given.get("function"), Mapping):
        given["function"] = _without_nothing(function)
    return given


def _without_nothing(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if not _is_nothing(value)}


def _is_nothing(value: object) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and len(value) == 0)


def _checked_message(index: int, message: object) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{field} is {kind_of(message)}; it must be an object with role and content", field=field
        )
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequestError(
            f"{field}.role is {shown(role)}; it must be one of {', '.join(ROLES)}", field=f"{field}.role"
        )
    given = _without_nothing(message)
    content = given.get("content", "")
    if isinstance(content, list):
        content = "\n".join(_text_of_part(field, part) for part in content)
    if not isinstance(content, str) or ("content" not in message and "tool_calls" not in given):
        raise InvalidRequestError(
            f"{field}.content is {shown(message.get('content'))}; it must be text, or a list of text parts",
            field=f"{field}.content",
        )
    require_text(content, f"{field}.content")
    if "tool_calls" in given:
        if not isinstance(given["tool_calls"], list):
            raise InvalidRequestError(
                f"{field}.tool_calls is {shown(given['tool_calls'])}; it must be a list",
                field=f"{field}.tool_calls",
            )
        given["tool_calls"] = [_checked_tool(call) for call in given["tool_calls"]]
    return given | {"content": content}


def _text_of_part(field: str, part: object) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = f"a part of type {shown(part.get('type'))}" if isinstance(part, Mapping) else kind_of(part)
    raise InvalidRequestError(
        f"{field}.content holds {kind}; only text parts are supported",
        field=f"{field}.content",
    )
