"""Chat messages and tools as people send them, checked and brought to one form.

Clients spell "nothing" as null, [], "" or by leaving a field out, and templates tell these apart by chance:
here all four are the last. Where content must be, "" is a text, and the others are none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.frontend.token_checks import require_text
from kernels_integration.errors import (
    InvalidRequestError,
    UnknownParameterError,
    kind_of,
    shortened,
    shown,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
_SAYS_MORE = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""What an assistant may say beside content, or instead of it."""
_TEXTS = ("name", "tool_call_id", "refusal", "reasoning_content", "reasoning", "thinking")


def checked_messages(messages: object) -> list[dict[str, Any]]:
    """Messages whose content is one text; results of tools in the order of their calls, by which templates
    tell them apart. Errors: InvalidRequestError naming the message."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            f"messages is {shown(messages)}; it must be a non-empty list of messages with role and content",
            field="messages",
        )
    return _results_in_order([_checked_message(i, message) for i, message in enumerate(messages)])


def _results_in_order(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Errors: InvalidRequestError for a result of a call that was not made. Where calls have no ids of
    their own, order is all there is."""
    ordered: list[dict[str, Any]] = []
    places: dict[str, int] = {}
    """Of the calls of the turn, by their ids."""
    results: list[dict[str, Any]] = []
    """Of the turn."""
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            given = message.get("tool_call_id")
            if places and given is not None and given not in places:
                field = f"messages[{index}].tool_call_id"
                raise InvalidRequestError(
                    f"{field} is {shown(given)}; it must be the id of a call before it: "
                    f"{shortened(', '.join(map(repr, places)))}",
                    field=field,
                )
            results.append(message)
            continue
        ordered += _in_order(results, places)
        ordered.append(message)
        results = []
        calls = [call.get("id") for call in message.get("tool_calls", ()) if isinstance(call, Mapping)]
        places = {name: place for place, name in enumerate(calls) if isinstance(name, str)}
        places = places if len(places) == len(calls) else {}
    return ordered + _in_order(results, places)


def _in_order(results: list[dict[str, Any]], places: Mapping[str, int]) -> list[dict[str, Any]]:
    if not places or not all("tool_call_id" in result for result in results):
        return results
    return sorted(results, key=lambda result: places[result["tool_call_id"]])


def checked_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """Tools in one form; None where there are none. Errors: InvalidRequestError."""
    if tools is not None and (isinstance(tools, str | Mapping) or not isinstance(tools, Sequence)):
        raise InvalidRequestError(
            f"tools is {shown(tools)}; it must be a list of objects of type function", field="tools"
        )
    return [_checked_tool(tool) for tool in tools] if tools else None


def require_known_fields(messages: Sequence[Mapping[str, Any]], knows: Callable[[str], bool]) -> None:
    """messages: checked ones. knows: whether chats are written with a field of this name.

    Errors: UnknownParameterError for a field that neither OpenAI nor the model's way to write chats has.
    """
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        role = message["role"]
        others = {name: value for name, value in message.items() if name in _ALL_FIELDS or not knows(name)}
        require_only(others, _FIELDS[role], field, of=f"a message of role {role}")
        for i, call in enumerate(message.get("tool_calls", ())):
            place = f"{field}.tool_calls[{i}]"
            if isinstance(call, Mapping):
                require_only(call, ("id", "type", "function", "index"), place, knows=knows)
                if isinstance(function := call.get("function"), Mapping):
                    require_only(function, ("name", "arguments"), f"{place}.function", knows=knows)


_FIELDS: Mapping[str, tuple[str, ...]] = {
    "system": ("role", "content", "name"),
    "developer": ("role", "content", "name"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "refusal", *_SAYS_MORE),
    "tool": ("role", "content", "name", "tool_call_id"),
}


_ALL_FIELDS = frozenset().union(*_FIELDS.values())


def require_only(
    fields: Mapping[str, Any],
    legal: Sequence[str],
    field: str,
    *,
    of: str = "it",
    knows: Callable[[str], bool] = lambda name: False,
) -> None:
    """Errors: UnknownParameterError for the first field that is neither legal nor known, nor null."""
    for name, value in fields.items():
        if name in legal or value is None or (isinstance(name, str) and knows(name)):
            continue
        path = f"{field}.{shortened(str(name))}"
        raise UnknownParameterError(f"{path} is unknown; {of} may hold {', '.join(legal)}", field=path)


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
    for name in _TEXTS:
        if name in given:
            if not isinstance(given[name], str):
                raise InvalidRequestError(
                    f"{field}.{name} is {shown(given[name])}; it must be text", field=f"{field}.{name}"
                )
            require_text(given[name], f"{field}.{name}")
    if "tool_calls" in given:
        given["tool_calls"] = _checked_calls(given["tool_calls"], f"{field}.tool_calls")
    return given | {"content": _content(field, given, message.get("content"))}


def _content(field: str, given: dict[str, Any], content: object) -> str:
    """The content as one text; a refusal is the content of the message that holds it."""
    field = f"{field}.content"
    refusal = given.pop("refusal", None)
    if refusal is not None and "content" in given:
        raise InvalidRequestError(
            f"{field} stands beside a refusal, and a message is one of both; leave one out", field=field
        )
    if refusal is not None:
        return str(refusal)
    if isinstance(content, list) and content:
        content = "\n".join(
            _text_of_part(part, f"{field}[{i}]", given["role"]) for i, part in enumerate(content)
        )
    says_more = given["role"] == "assistant" and any(name in given for name in _SAYS_MORE)
    if says_more and (content is None or content == []):
        return ""
    if not isinstance(content, str):
        hint = ", or null where there are tool_calls" if given["role"] == "assistant" else ""
        raise InvalidRequestError(
            f"{field} is {shown(content)}; it must be text, or a list of text parts{hint}", field=field
        )
    require_text(content, field)
    return content


def _checked_calls(calls: object, field: str) -> list[Any]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{field} is {shown(calls)}; it must be a list", field=field)
    for i, call in enumerate(calls):
        for name, is_legal, rule in (
            ("index", lambda value, place=i: value == place, f"{i}, its place"),  # of streams put together
            ("type", lambda value: value == "function", "function"),
            ("id", lambda value: isinstance(value, str), "text"),
        ):
            value = call.get(name) if isinstance(call, Mapping) else None
            if value is not None and not is_legal(value):
                place = f"{field}[{i}].{name}"
                raise InvalidRequestError(
                    f"{place} is {shown(value)}; it must be {rule}, or be left out", field=place
                )
    return [_checked_tool(call) for call in calls]


def _text_of_part(part: object, field: str, role: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    key = "refusal" if kind == "refusal" and role == "assistant" else "text"
    if not isinstance(part, Mapping) or kind != key:
        told = f"a part of type {shown(kind)}" if isinstance(part, Mapping) else kind_of(part)
        raise InvalidRequestError(f"{field} is {told}; only text parts are supported", field=field)
    require_only(part, ("type", key), field)
    if not isinstance(part.get(key), str):
        raise InvalidRequestError(
            f"{field}.{key} is {shown(part.get(key))}; it must be text", field=f"{field}.{key}"
        )
    return str(part[key])
