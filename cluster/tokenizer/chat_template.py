"""Chat templates: untrusted Jinja from the checkpoint, rendered in a sandbox as transformers does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kernels_integration.errors import CheckpointError, InvalidRequestError


class ChatTemplate:
    """One compiled template. `special_tokens` are variables of the template, such as bos_token."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """Errors: CheckpointError when the template is no legal Jinja."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template is no legal Jinja: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a chat.

        Messages must be plain data (no objects with methods of their own).
        Errors: InvalidRequestError with the template's own words when it refuses the messages.
        """
        # An absent content and one of None mean the same; templates would print "None".
        chat = [{key: value for key, value in m.items() if value is not None} for m in messages]
        try:
            return self._template.render(
                **self._special_tokens
                | {"messages": chat, "tools": tools, "documents": None}
                | {"add_generation_prompt": add_generation_prompt}
                | variables
            )
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", field="messages"
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise InvalidRequestError(
                f"the model's chat template failed on these messages: {error!r}", field="messages"
            ) from error


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's text for training; here it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
