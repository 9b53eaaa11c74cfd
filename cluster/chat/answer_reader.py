"""An answer's text, in whatever pieces it comes, as thoughts, content and calls of tools."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cluster.chat.answer_form import AnswerForm
from cluster.chat.answer_parts import CallArguments, CallBegins, Content, Part
from cluster.chat.incoming import Incoming, Reader
from cluster.chat.reasoning import thoughts


class AnswerReader:
    """Reads one answer. The parts of `push` and `finish`, joined, are the same for every way to cut the text.

    opened: the prompt has begun the thoughts. tools: as OpenAI's; None or none: nothing is taken for a call.
    one_call: the answer ends with its first call.
    """

    def __init__(
        self,
        form: AnswerForm,
        *,
        opened: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        one_call: bool = False,
    ) -> None:
        self._form = form
        self._schemas = {tool["function"]["name"]: _properties(tool["function"]) for tool in tools or ()}
        self._one_call = one_call
        self._num_calls = 0
        self._incoming = Incoming()
        self._parts = self._read(opened)

    def push(self, text: str) -> list[Part]:
        """What is certain now."""
        self._incoming.text += text
        return list(self._certain()) if text else []

    def finish(self) -> list[Part]:
        """The rest, at the end of the text."""
        self._incoming.ended = True
        return list(self._certain())

    def _certain(self) -> Iterator[Part]:
        for part in self._parts:
            if part is None:
                return
            self._num_calls += isinstance(part, CallBegins)
            if self._is_shown(part):
                yield part

    def _is_shown(self, part: Part) -> bool:
        if not self._one_call or not self._num_calls:
            return True
        return self._num_calls == 1 and isinstance(part, CallBegins | CallArguments)

    def _read(self, opened: bool) -> Reader[None]:
        incoming = self._incoming
        if self._form.thinks:
            yield from thoughts(incoming, opened=opened)
        if self._form.calls is not None and self._schemas:
            yield from self._form.calls.read(incoming, self._schemas)
        while not incoming.ended or incoming.text:
            text = incoming.skip(len(incoming.text))
            yield Content(text) if text else None


def _properties(function: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}
