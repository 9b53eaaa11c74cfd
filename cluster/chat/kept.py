"""Proof that a prompt holds what the chat says: templates leave out what they do not know without a word.

The chat is rendered once more with a mark in the place of every text, name of a called tool and name of a
tool. A mark that is missing stands for what the template left out. Thoughts are no part of the proof:
templates drop those of finished turns on purpose.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a request: as messages describe it, and its field."""

    described: str
    field: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Marked:
    messages: list[dict[str, Any]]
    tools: Any
    parts: dict[str, Part]
    """By mark."""


def first_dropped(
    prompt: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    render: Callable[[Sequence[Mapping[str, Any]], Any], str],
) -> Part | None:
    """The first part of the chat that is not in its prompt; None where all are.

    render: messages and tools to a prompt. Where it fails on the marked chat, a text counts as left out if
    the prompt does not hold it as it is.
    """
    marked = _mark(messages, tools)
    try:
        found = render(marked.messages, marked.tools).lower()
    except Exception:  # what a template can raise has no end
        return _first_absent(prompt, messages)
    return next((part for mark, part in marked.parts.items() if mark not in found), None)


def _mark(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> _Marked:
    parts: dict[str, Part] = {}

    def mark(described: str, field: str) -> str:
        word = f"mark{len(parts)}end"
        parts[word] = Part(described=described, field=field)
        return word

    copies = []
    for index, message in enumerate(messages):
        copy, field = dict(message), f"messages[{index}]"
        of_role = f"of role {message.get('role')}"
        if isinstance(content := message.get("content"), str) and content.strip():
            copy["content"] = mark(f"{field}, {of_role},", f"{field}.content")
        if message.get("tool_calls"):
            copy["tool_calls"] = [
                _renamed(call, mark(f"{field}.tool_calls[{i}], {of_role},", f"{field}.tool_calls[{i}]"))
                for i, call in enumerate(message["tool_calls"])
            ]
        copies.append(copy)
    marked_tools = tools and [
        _renamed(tool, mark(f"tools[{i}]", f"tools[{i}]")) if _function(tool) else tool
        for i, tool in enumerate(tools)
    ]
    return _Marked(messages=copies, tools=marked_tools, parts=parts)


def _function(tool: object) -> Mapping[str, Any] | None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) and "name" in function else None


def _renamed(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    return dict(tool) | {"function": dict(tool["function"]) | {"name": name}}


def _first_absent(prompt: str, messages: Sequence[Mapping[str, Any]]) -> Part | None:
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and content.strip() not in prompt:
            field = f"messages[{index}]"
            return Part(described=f"{field}, of role {message.get('role')},", field=f"{field}.content")
    return None
