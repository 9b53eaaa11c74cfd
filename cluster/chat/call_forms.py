"""How models write that they call tools, and how that is read.

DeepSeek-V3 and -V3.1 write JSON between marks; DeepSeek-V3.2 (DSML) and GLM-4.5 to 5.x write parameter by
parameter. Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324, DeepSeek-V3.1, zai-org/GLM-4.5,
GLM-4.7 and GLM-5, and the encoding of DeepSeek-V3.2.

What has not the form of a call up to the beginning of its arguments is content, character by character. From
there on all is arguments up to their closing mark: an answer that is cut there has a call whose JSON is cut.
"""

import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.chat.answer_parts import CallArguments, CallBegins, Content
from cluster.chat.argument_values import Properties, choices, is_text_alone, json_of, json_of_choice
from cluster.chat.formats import NOTHING, Format, json_schema, some_of, tag
from cluster.chat.incoming import (
    MAX_NAME,
    MAX_SPACE,
    SPACE_BEFORE,
    Incoming,
    Name,
    Pattern,
    Reader,
    Space,
    before,
    matched,
    whole_before,
)
from kernels_integration.errors import InvalidRequestError, shown

ToolSchemas = Mapping[str, Properties]
"""By tool, the JSON schemas of its parameters by their names."""


class CallForm(Protocol):
    """One way to write calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts of which tokenizers may have tokens of their own."""

    @property
    def not_in_parameters(self) -> str:
        """Characters that no parameter's name may have."""

    def can_write(self, parameter: str) -> bool:
        """Whether a parameter of this name can be read back."""

    def read(self, incoming: Incoming, tools: ToolSchemas) -> Reader[None]:
        """Read content and calls to the end of the text."""

    def format(self, tools: Sequence[Mapping[str, Any]], *, one_call: bool) -> Format:
        """What a text of calls of these tools alone looks like. tools: as OpenAI's, at least one.

        Errors: InvalidRequestError for a tool that the form cannot carry.
        """


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """<｜tool▁calls▁begin｜>, calls of a name and JSON, <｜tool▁calls▁end｜>.

    before_name, after_name: what stands between <｜tool▁call▁begin｜>, the name and the JSON.
    before_end: between the JSON and <｜tool▁call▁end｜>; tail: what may stand there. between: calls.
    """

    before_name: tuple[str, ...]
    after_name: tuple[str, ...]
    before_end: str = ""
    between: str = ""
    tail: re.Pattern[str] = SPACE_BEFORE

    @property
    def marks(self) -> tuple[str, ...]:
        return (_CALLS, _CALL, _SEPARATOR, _END_CALL, _END_CALLS)

    @property
    def not_in_parameters(self) -> str:
        return ""

    def can_write(self, parameter: str) -> bool:
        return True  # JSON can

    def read(self, incoming: Incoming, tools: ToolSchemas) -> Reader[None]:
        call: tuple[str | Space | Name, ...] = (
            Space(),
            _CALL,
            *self.before_name,
            Name(_NOT_IN_NAMES),
            *self.after_name,
            Space(),
        )
        while (yield from before(incoming, _CALLS, make=Content, tail=SPACE_BEFORE)):
            first = (Space(), _CALLS, *call)
            found = yield from matched(incoming, (*first, "{"), (*first, _END_CALL))
            if found is None:
                yield _as_content(incoming, _CALLS)
            while found is not None and found[0] < _NO_CALL:
                number, [name] = found
                yield CallBegins(name)
                yield CallArguments("{}" if number == _EMPTY else "{")
                if number != _EMPTY:
                    ends = (_END_CALL, _CALL, _END_CALLS)
                    yield from before(incoming, *ends, make=CallArguments, tail=self.tail, drop_begun=True)
                    yield from self._end(incoming)
                found = yield from matched(incoming, (*call, "{"), (*call, _END_CALL), (Space(), _END_CALLS))

    def format(self, tools: Sequence[Mapping[str, Any]], *, one_call: bool) -> Format:
        calls = [
            tag(
                "".join((_CALL, *self.before_name, tool["function"]["name"], *self.after_name)),
                json_schema(tool["function"].get("parameters") or {"type": "object"}),
                self.before_end + _END_CALL,
            )
            for tool in tools
        ]
        return tag(_CALLS, some_of(calls, self.between, one=one_call), _END_CALLS)

    def _end(self, incoming: Incoming) -> Generator[None, None, None]:
        """Read the tail, and the end of a call if it has one."""
        at = min(at for mark in self.marks if (at := incoming.text.find(mark)) >= 0) if incoming.text else 0
        incoming.skip(at)
        yield from matched(incoming, (_END_CALL,))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A form to the letter. style: xgrammar's name for the parameters. begin, end: around all calls."""

    style: str
    before_name: str
    after_name: str = ""
    end_call: str
    between: str = ""
    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class ParameterCalls:
    """Calls whose parameters are each between marks of their own.

    opening: the mark before calls, where a text begins to be one. call: from there to behind the name.
    parameter: up to its value; its names are the parameter's and, in DSML, "true" for a text.
    again: of the calls after the first; None: each has its opening. written: the form, to be kept to.
    """

    opening: str
    call: Pattern
    again: Pattern | None
    parameter: Pattern
    end_value: str
    end_call: Pattern
    written: "Written"
    end_calls: Pattern | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        patterns = (self.call, self.parameter, (self.end_value,), self.end_call, self.end_calls or ())
        return tuple(item for pattern in patterns for item in pattern if isinstance(item, str))

    @property
    def not_in_parameters(self) -> str:
        names = [item for item in self.parameter if isinstance(item, Name)]
        return "".join(dict.fromkeys("".join(name.without for name in names)))

    def can_write(self, parameter: str) -> bool:
        whole = 0 < len(parameter) <= MAX_NAME and parameter == parameter.strip()
        return whole and not set(parameter) & set(self.not_in_parameters)

    def read(self, incoming: Incoming, tools: ToolSchemas) -> Reader[None]:
        while (yield from before(incoming, self.opening, make=Content, tail=SPACE_BEFORE)):
            found = yield from matched(incoming, *self._begins(self.call))
            if found is None:
                yield _as_content(incoming, self.opening)
            while found is not None and found[0] < _NO_CALL:
                number, [name, *parameter] = found
                yield CallBegins(name)
                if number == _EMPTY:
                    yield CallArguments("{}")
                else:
                    yield from self._arguments(incoming, tools.get(name, {}), parameter)
                if self.again is None or self.end_calls is None:
                    break
                found = yield from matched(incoming, *self._begins(self.again), self.end_calls)

    def format(self, tools: Sequence[Mapping[str, Any]], *, one_call: bool) -> Format:
        written = self.written
        calls = []
        for tool in tools:
            function = tool["function"]
            schema = function.get("parameters")
            has_some = isinstance(schema, Mapping) and bool(schema.get("properties"))
            if isinstance(schema, Mapping) and has_some:
                self._require_writable(function["name"], schema["properties"])
            calls.append(
                tag(
                    written.before_name + function["name"] + written.after_name,
                    json_schema(_without_end_marks(schema), written.style) if has_some else NOTHING,
                    written.end_call,
                )
            )
        found = some_of(calls, written.between, one=one_call)
        return tag(written.begin, found, written.end) if written.begin else found

    def _require_writable(self, function: str, names: Iterable[str]) -> None:
        """Names of parameters stand between marks, bare. Errors: InvalidRequestError for one that cannot."""
        for name in names:
            if not self.can_write(name):
                marks = " ".join(json.dumps(mark) for mark in self.not_in_parameters)
                raise InvalidRequestError(
                    f"tool_choice demands a call of {shown(function)}, whose parameter {shown(name)} this "
                    f"model's form of calls cannot carry: a name must hold a character, none of {marks}, and "
                    "neither begin nor end with white space; rename it",
                    field="tools",
                )

    def _begins(self, call: Pattern) -> tuple[Pattern, Pattern]:
        return (*call, *self.parameter), (*call, *self.end_call)

    def _arguments(self, incoming: Incoming, schemas: Properties, parameter: list[str]) -> Reader[None]:
        """From the first value to the end of the call, as one JSON object."""
        separator = "{"
        while True:
            name = parameter[0].strip()
            is_text = parameter[1] == "true" if len(parameter) > 1 else is_text_alone(schemas.get(name))
            yield CallArguments(f"{separator}{json.dumps(name, ensure_ascii=False)}: ")
            separator = ", "
            if is_text and not choices(schemas.get(name)):
                yield CallArguments('"')
                is_whole = yield from before(incoming, self.end_value, make=_escaped, drop_begun=True)
                if is_whole:
                    incoming.skip(len(self.end_value))
                    yield CallArguments('"')
            else:
                value, is_whole = yield from whole_before(incoming, self.end_value)
                if is_whole:
                    chosen = json_of_choice(value, schemas.get(name))
                    text = (
                        json.dumps(value, ensure_ascii=False)
                        if is_text
                        else json_of(value, schemas.get(name))
                    )
                    value = text if chosen is None else chosen
                yield CallArguments(value)
            if not is_whole:
                return
            following = yield from matched(incoming, self.parameter, self.end_call)
            if following is None and incoming.ended:
                incoming.skip(len(incoming.text))  # a mark that has begun
                return  # cut, so that nobody takes it for all
            if following is None or following[0] == 1:
                yield CallArguments("}")
                return
            parameter = following[1]


def _without_end_marks(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The same, but texts of a bounded length hold no "<": by their length alone they might hold the mark
    that ends them. xgrammar keeps the mark out of unbounded ones."""
    properties = {name: _bounded_text(value) for name, value in schema["properties"].items()}
    return dict(schema) | {"properties": properties}


def _bounded_text(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return schema
    if schema.keys() & {"pattern", "format", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"}:
        return schema
    bounds = {name: schema[name] for name in ("minLength", "maxLength") if name in schema}
    if not bounds or not all(type(bound) is int for bound in bounds.values()):
        return schema
    shortest, longest = bounds.get("minLength", 0), bounds.get("maxLength", "")
    if longest != "" and not 0 <= shortest <= longest:
        return schema  # no text is of this length: refused in those words
    kept = {name: value for name, value in schema.items() if name not in bounds}
    return kept | {"pattern": f"^[^<]{{{shortest},{longest}}}$"}


def _as_content(incoming: Incoming, mark: str) -> Content:
    """Up to behind the mark, which is not the beginning of a call."""
    return Content(incoming.skip(incoming.text.index(mark) + len(mark)))


def _escaped(text: str) -> CallArguments:
    """A piece of a JSON text."""
    return CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])


_EMPTY = 1
"""Number of the pattern of a call without arguments, after that of a call with some."""
_NO_CALL = 2

_NOT_IN_NAMES = ' \t\r\n"<>{}`'
_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"

_DSML_INVOKE: Pattern = (Space(), '<｜DSML｜invoke name="', Name('"<>\n'), '">')
_DSML_PARAMETER: Pattern = (
    Space(),
    '<｜DSML｜parameter name="',
    Name('"<>\n'),
    '" string="',
    Name('"<>\n'),
    '">',
)
_GLM_PARAMETER: Pattern = (Space(), "<arg_key>", Name("<"), "</arg_key>", Space(), "<arg_value>")

DEEPSEEK_V3 = JsonCalls(
    before_name=("function", _SEPARATOR),
    after_name=("\n```json\n",),
    before_end="\n```",
    between="\n",
    tail=re.compile(rf"\s{{0,{MAX_SPACE}}}(`{{1,3}}\s{{0,4}})?\Z"),
)
DEEPSEEK_V31 = JsonCalls(before_name=(), after_name=(_SEPARATOR,))
DEEPSEEK_V32 = ParameterCalls(
    opening="<｜DSML｜function_calls>",
    call=(Space(), "<｜DSML｜function_calls>", *_DSML_INVOKE),
    again=_DSML_INVOKE,
    parameter=_DSML_PARAMETER,
    end_value="</｜DSML｜parameter>",
    end_call=(Space(), "</｜DSML｜invoke>"),
    end_calls=(Space(), "</｜DSML｜function_calls>"),
    written=Written(
        style="deepseek_xml",
        begin="<｜DSML｜function_calls>\n",
        before_name='<｜DSML｜invoke name="',
        after_name='">\n',
        end_call="</｜DSML｜invoke>\n",
        end="</｜DSML｜function_calls>",
    ),
)
GLM = ParameterCalls(
    opening="<tool_call>",
    call=(Space(), "<tool_call>", Space(), Name(_NOT_IN_NAMES)),
    again=None,
    parameter=_GLM_PARAMETER,
    end_value="</arg_value>",
    end_call=(Space(), "</tool_call>"),
    written=Written(style="glm_xml", before_name="<tool_call>", end_call="</tool_call>"),
)
