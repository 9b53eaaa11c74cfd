"""A checkpoint's chat template: untrusted Jinja, compiled and rendered in a process of its own."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.chat.process import TemplateProcess
from kernels_integration.errors import CheckpointError, InvalidRequestError, shown

RESERVED = ("messages", "tools", "add_generation_prompt")
"""Variables of a template that are arguments of their own."""
MAX_CHARACTERS = 2**18
"""Of a template's source; released ones have up to 20,000."""


class ChatTemplate:
    """One template. name: as the checkpoint calls it, for messages. process: where it runs."""

    def __init__(self, source: str, *, name: str = "default", process: TemplateProcess | None = None) -> None:
        """Errors: CheckpointError when the template does not compile."""
        self.source = source
        self._process = TemplateProcess() if process is None else process
        if len(source) > MAX_CHARACTERS:
            raise CheckpointError(
                f"the chat template {name} has {len(source)} characters; at most {MAX_CHARACTERS} are read"
            )
        problem = self._process.check(source)
        if problem is not None:
            raise CheckpointError(f"the chat template {name} {problem}")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat, in which every message and tool is found.

        Messages, tools and arguments must be plain data, as JSON has it. A developer's messages are shown
        as a system's where the template does not know the role.
        special_tokens: variables of the template, such as bos_token, which template_kwargs may replace.
        Errors: InvalidRequestError with the template's own words when it refuses the messages, and naming
        what it would leave out.
        """
        more = dict(template_kwargs or {})
        for name in more:
            if not isinstance(name, str) or not name.isidentifier() or name in RESERVED:
                raise InvalidRequestError(
                    f"chat_template_kwargs holds {shown(name)}; it must hold names of the template's "
                    f"variables, without {', '.join(RESERVED)}",
                    field="chat_template_kwargs",
                )
            if not re.search(rf"\b{name}\b", self.source):
                raise InvalidRequestError(
                    f"chat_template_kwargs holds {shown(name)}, which the model's chat template does not "
                    "read; leave it out",
                    field="chat_template_kwargs",
                )
        variables = dict(special_tokens or {}) | {"documents": None} | more
        variables |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        chat = [dict(message) for message in messages]
        try:
            return self._render(chat, variables)
        except InvalidRequestError:
            as_system = [m | {"role": "system"} if m.get("role") == "developer" else m for m in chat]
            if as_system == chat:
                raise
        return self._render(as_system, variables)

    def _render(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        rendered = self._process.render(self.source, messages, variables)
        if rendered.dropped is not None:
            raise InvalidRequestError(
                f"{rendered.dropped.described} is not in the prompt that the model's chat template makes; "
                "leave it out, or give a template that knows it by --chat-template FILE",
                field=rendered.dropped.field,
            )
        return rendered.prompt
