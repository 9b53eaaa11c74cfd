"""The body of /v1/responses: the part of it that needs no memory between requests."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import StrictBool

from actors.requests import Request
from cluster.frontend.front_end import ModelFrontend
from cluster.openai.chat_body import ChatBody
from cluster.openai.response_input import conversation
from cluster.openai.sampling_body import SamplingBody
from kernels_integration.errors import InvalidRequestError, shown


class ResponsesBody(SamplingBody):
    """A conversation that the body holds as a whole. It is answered as the chat that it amounts to."""

    not_taken: ClassVar[frozenset[str]] = frozenset(
        {"n", "max_tokens", "logprobs", "prompt_logprobs", "stream_options", "response_format"}
    )

    input: Any
    instructions: Any = None
    max_output_tokens: Any = None
    text: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self) -> ChatBody:
        """The same as a body of /v1/chat/completions. Errors: InvalidRequestError."""
        found = conversation(self.input, self.instructions)
        is_idle = not self.tools and self.tool_choice == "auto"  # as responses tell it, sent back
        return ChatBody.model_validate(
            self.given_parameters
            | {
                "model": self.model,
                "messages": found.messages,
                "max_completion_tokens": self.max_output_tokens,
                "tools": _chat_tools(self.tools),
                "tool_choice": None if is_idle else _chat_choice(self.tool_choice),
                "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
                "chat_template_kwargs": self.chat_template_kwargs,
                "priority": self.priority,
                "cache_salt": self.cache_salt,
                "stream": self.stream,
            }
            | _chat_format(self.text)
        )

    def to_requests(self, request_id: str, frontend: ModelFrontend) -> list[Request]:
        """The one. Errors: InvalidRequestError, whose field is one of this body."""
        try:
            return self.chat().to_requests(request_id, frontend)
        except InvalidRequestError as error:
            field = self._own_field(error.field or "")
            if field == error.field:
                raise
            raise type(error)(str(error).replace(error.field or "", field), field=field) from error

    def _own_field(self, field: str) -> str:
        """What this body calls a field of the chat."""
        if found := _OF_A_CALL.fullmatch(field):
            index, call, rest = found.groups()
            calls = conversation(self.input, self.instructions).calls
            return calls.get((int(index), int(call)), "input") + rest.replace(".function.", ".")
        if field.startswith("messages["):
            index, _, rest = field.removeprefix("messages[").partition("]")
            places = conversation(self.input, self.instructions).places
            place = places[int(index)] if int(index) < len(places) else "input"
            return place + rest.replace(".tool_call_id", ".call_id")
        if field.startswith("response_format"):
            return field.replace("response_format.json_schema", "text.format").replace(
                "response_format", "text.format"
            )
        return {"messages": "input", "max_completion_tokens": "max_output_tokens"}.get(
            field, field.replace("].function", "]") if field.startswith("tools[") else field
        )


_OF_A_CALL = re.compile(r"messages\[(\d+)\]\.tool_calls\[(\d+)\](.*)")


def _chat_tools(tools: object) -> object:
    """Tools of /v1/responses have their function's fields themselves."""
    if not isinstance(tools, list):
        return tools
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if isinstance(tool, Mapping) and tool.get("type") == "function"
        else tool
        for tool in tools
    ]


def _chat_choice(choice: object) -> object:
    if isinstance(choice, Mapping) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _chat_format(text: object) -> dict[str, Any]:
    """What `text` asks for. Errors: InvalidRequestError."""
    form = text.get("format") if isinstance(text, Mapping) else None
    others = (
        [name for name, value in text.items() if name != "format" and value is not None]
        if isinstance(text, Mapping)
        else []
    )
    if others:
        raise InvalidRequestError(
            f"text.{others[0]} is {shown(text[others[0]])}, which is not supported; leave it out",  # type: ignore[index]
            field=f"text.{others[0]}"[:100],
        )
    if text is None or (isinstance(text, Mapping) and form is None):
        return {}
    if not isinstance(form, Mapping) or form.get("type") not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(
            f'text is {shown(text)}; it must be an object whose "format" has the type text, json_object or '
            "json_schema",
            field="text.format",
        )
    if form["type"] == "json_schema":  # here its fields stand beside the type
        form = {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}
    return {"response_format": form}
