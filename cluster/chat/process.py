"""The process in which templates run, from the side that asks.

A template is a program by a stranger: a macro that calls itself or a filter that pads to a gigabyte ends with
its process, not with ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.bounded_process import BoundedProcess, is_out_of_time
from cluster.chat.kept import Part
from kernels_integration.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """Of one rendering. memory_bytes: of the process, all of its address space."""

    seconds: float = 10.0
    memory_bytes: int = 2**30
    characters: int = 2**24
    """Of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    prompt: str
    dropped: Part | None
    """The first part of the chat that the prompt does not hold."""


class TemplateProcess(BoundedProcess):
    """Compiles and renders, one template at a time, for any number of threads."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        arguments = (self.limits.seconds, self.limits.memory_bytes, self.limits.characters)
        super().__init__("cluster.chat.worker", arguments, purpose="to render chat templates")

    def check(self, source: str) -> str | None:
        """What is wrong with a template, None if it compiles."""
        answer = self._ask({"source": source})
        if "limit" in answer:
            return f"cannot be compiled: {answer['limit']}; simplify it"
        return f"is no legal Jinja: {answer['error'].partition(': ')[2]}" if "error" in answer else None

    def render(
        self, source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Rendered:
        """A chat's prompt. variables: all but messages, tools among them.

        Errors: InvalidRequestError: the template refuses, fails, or does not end within the limits.
        """
        answer = self._ask({"source": source, "messages": messages, "variables": variables})
        if "limit" in answer:
            raise InvalidRequestError(
                f"the model's chat template failed on these messages: {answer['limit']}; shorten them, or "
                "give another template by --chat-template FILE",
                field="messages",
            )
        if "error" in answer:
            raise InvalidRequestError(answer["error"], field=answer["field"])
        dropped = answer["dropped"]
        return Rendered(prompt=answer["prompt"], dropped=None if dropped is None else Part(**dropped))

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            answer = self.ask(request)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"messages, tools and chat_template_kwargs must be plain data, as JSON has it: {error}",
                field="messages",
            ) from None
        if not isinstance(answer, int):
            return answer
        if is_out_of_time(answer):
            why = f"it takes more than {self.limits.seconds:g} seconds"
        else:
            why = f"its process, which may take {self.limits.memory_bytes} bytes, ended (exit code {answer})"
        return {"limit": why}
