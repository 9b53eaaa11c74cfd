"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat's body, checked."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.chat.incoming import MAX_NAME
from cluster.chat.messages import require_only
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import InvalidRequestError, shown

MAX_TOOLS = 1024
NAME_PATTERN = r"[A-Za-z0-9_.:/-]{1,256}"
_NAME = re.compile(NAME_PATTERN)
_NAME_RULE = "a text of 1 to 256 letters, digits and _ . : / -"


def checked_tools(tools: object, frontend: ModelFrontend) -> list[Mapping[str, Any]]:
    """Tools of type function, each with a name of its own; [] where there are none.

    Errors: InvalidRequestError naming the place; also when nobody knows how the model calls tools.
    """
    if tools is None or tools == []:
        return []
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise InvalidRequestError(
            f"tools is {shown(tools)}; it must be a list of at most {MAX_TOOLS} objects of type function",
            field="tools",
        )
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = _name(tool, f"tools[{index}]", frontend)
        if name in names:
            field = f"tools[{index}].function.name"
            raise InvalidRequestError(
                f"{field} is {shown(name)}, as of an earlier tool; give each a name of its own", field=field
            )
        names.add(name)
    if frontend.answer_form.calls is None:
        raise InvalidRequestError(
            f"tools are given, and it is not known how {frontend.served_model_name} calls them; leave them "
            "out, or name its form by --tool-call-parser",
            field="tools",
        )
    return tools


def shows_tools(choice: object, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the model may call the tools: it is shown them then. Errors: InvalidRequestError."""
    demanded_tools(choice, tools)
    return bool(tools) and choice != "none"


def demanded_tools(choice: object, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools of which one must be called; [] where none must. Errors: InvalidRequestError; as with OpenAI
    also for auto without tools."""
    if choice is None or choice == "none" or (choice == "auto" and tools):
        return []
    if isinstance(choice, Mapping):
        require_only(choice, ("type", "function"), "tool_choice")
        if isinstance(function := choice.get("function"), Mapping):
            require_only(function, ("name",), "tool_choice.function")
    named = _named(choice)
    if choice not in ("auto", "required") and named is None:
        raise InvalidRequestError(
            f"tool_choice is {shown(choice)}; it must be auto, none, required, or an object of type function "
            "with a function's name",
            field="tool_choice",
        )
    if not tools:
        raise InvalidRequestError(
            f"tool_choice is {shown(choice)} without tools; give tools, or leave it out", field="tool_choice"
        )
    found = [tool for tool in tools if named is None or tool["function"]["name"] == named]
    if not found:
        raise InvalidRequestError(
            f"tool_choice names {shown(named)}, which is none of the tools", field="tool_choice"
        )
    for tool in found:
        _require_properties(tool["function"])
    return found


_TELL_NOTHING = frozenset(
    {"type", "properties", "additionalProperties", "required", "title", "description", "$schema", "$defs"}
)


def _require_properties(function: Mapping[str, Any]) -> None:
    """Arguments are held to `properties`: a schema that says otherwise what they are would not be held to.

    Errors: InvalidRequestError.
    """
    schema = function.get("parameters")
    if not isinstance(schema, Mapping) or schema.get("properties"):
        return
    told = sorted(name for name in schema if name not in _TELL_NOTHING)
    told += ["required"] if schema.get("required") else []
    told += ["type"] if schema.get("type", "object") != "object" else []
    if told:
        raise InvalidRequestError(
            f"tool_choice demands a call of {shown(function['name'])}, whose parameters have "
            f"{', '.join(told)} and no properties, and could not be held to them; write its "
            "properties at their top",
            field="tools",
        )


def _named(choice: object) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    is_function = isinstance(function, Mapping) and choice.get("type") == "function"  # type: ignore[attr-defined]
    name = function.get("name") if is_function else None  # type: ignore[union-attr]
    return name if isinstance(name, str) else None


def _name(tool: object, field: str, frontend: ModelFrontend) -> str:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise InvalidRequestError(
            f"{field} is of type {shown(kind)}; it must be an object of type function", field=f"{field}.type"
        )
    knows = frontend.tokenizer.knows_field
    require_only(tool, ("type", "function"), field, of="a tool", knows=knows)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(
            f"{field}.function is {shown(function)}; it must be an object with a name and parameters",
            field=f"{field}.function",
        )
    field = f"{field}.function"
    require_only(function, ("name", "description", "parameters", "strict"), field, knows=knows)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"{field}.name is {shown(name)}; it must be {_NAME_RULE}", field=f"{field}.name"
        )
    for key, kind, rule in (
        ("parameters", Mapping, "a JSON schema"),
        ("description", str, "text"),
        ("strict", bool, "true or false"),
    ):
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequestError(
                f"{field}.{key} is {shown(value)}; it must be {rule}", field=f"{field}.{key}"
            )
    _require_writable(parameters, f"{field}.parameters", frontend)
    return name


def _require_writable(parameters: Mapping[str, Any] | None, field: str, frontend: ModelFrontend) -> None:
    """Errors: InvalidRequestError for a property whose name has no place in the model's form of calls."""
    form = frontend.answer_form.calls
    properties = parameters.get("properties") if parameters is not None else None
    if properties is not None and not isinstance(properties, Mapping):
        raise InvalidRequestError(
            f"{field}.properties is {shown(properties)}; it must be an object of JSON schemas",
            field=f"{field}.properties",
        )
    if form is None or properties is None:
        return
    for name in properties:
        if not form.can_write(name):
            raise InvalidRequestError(
                f"{field}.properties holds {shown(name)}; the model writes calls in a form in which a "
                f"parameter's name has 1 to {MAX_NAME} characters, no spaces at its ends, and none of "
                f"{' '.join(form.not_in_parameters.strip())}: rename it",
                field=f"{field}.properties",
            )
