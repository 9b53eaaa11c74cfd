"""Chat templates: untrusted Jinja from the checkpoint, rendered in a sandbox as transformers does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2

from cluster.tokenizer.template_sandbox import Budget, TemplateSandbox
from cluster.tokenizer.template_values import template_message
from kernels_integration.errors import CheckpointError, InvalidRequestError

RESERVED = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that are arguments of their own."""


class ChatTemplate:
    """One compiled template. name: as the checkpoint calls it, for messages."""

    def __init__(self, source: str, *, name: str = "default") -> None:
        """Errors: CheckpointError when the template is no legal Jinja."""
        self.source = source
        sandbox = TemplateSandbox()
        sandbox.filters["tojson"] = _to_json
        sandbox.globals["raise_exception"] = _raise_exception
        sandbox.globals["strftime_now"] = _strftime_now
        try:
            self._template = sandbox.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise CheckpointError(f"the chat template {name} is no legal Jinja: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat.

        Messages and arguments must be plain data (no objects with methods of their own).
        special_tokens: variables of the template, such as bos_token, which template_kwargs may replace.
        Errors: InvalidRequestError with the template's own words when it refuses the messages.
        """
        more = dict(template_kwargs or {})
        for name in more:
            if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
                raise InvalidRequestError(
                    f"chat_template_kwargs holds {name!r}; it must hold names of the template's variables, "
                    f"without {', '.join(RESERVED)}",
                    field="chat_template_kwargs",
                )
        variables = dict(special_tokens or {}) | {"documents": None} | more
        variables |= {
            "messages": [template_message(i, message) for i, message in enumerate(messages)],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(variables | Budget.variable())
        except jinja2.TemplateError as error:
            raise InvalidRequestError(
                f"messages do not fit the model's chat template: {error}", field="messages"
            ) from error
        except Exception as error:  # a template can raise whatever Python's operators and methods do
            raise InvalidRequestError(
                f"the model's chat template failed on these messages: {error!r}", field="messages"
            ) from error


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
