"""What an answer must look like where calls of tools, or a form of its content, are demanded.

Source of the shapes: xgrammar 0.2, structural_tag.py. Thoughts stay free: a model that thinks before its
answer is held to nothing until they end.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from actors.structured_outputs import StructuredOutputs
from cluster.chat.answer_form import AnswerForm
from cluster.chat.formats import Format, tag
from cluster.chat.reasoning import END_THINK, THINK, opens_thoughts
from kernels_integration.errors import InvalidRequestError


def held_answer(
    form: AnswerForm,
    prompt_end: str,
    *,
    calls: Iterable[Mapping[str, Any]] = (),
    content: StructuredOutputs | None = None,
    one_call: bool = False,
) -> StructuredOutputs | None:
    """The constraint of a whole answer: of its thoughts none, then calls of these tools or such content.

    prompt_end: the end of the prompt, which tells whether thoughts have begun. one_call: one call alone.
    None where nothing is demanded. Errors: InvalidRequestError for one that is too long or too deep.
    """
    tools = list(calls)
    if not tools and content is None:
        return None
    opened = form.thinks and opens_thoughts(prompt_end)
    prefix = _thoughts(form) if not opened and not prompt_end.rstrip().endswith(END_THINK) else None
    if prefix is None and not tools:
        assert content is not None
        return content.behind(END_THINK) if opened else content
    demanded: list[Format] = []
    if tools:
        assert form.calls is not None
        demanded.append(form.calls.format(tools, one_call=one_call))
    if content is not None:
        demanded.append(content.as_format())
    answer = demanded[0] if len(demanded) == 1 else {"type": "or", "elements": demanded}
    if prefix is not None:
        answer = {"type": "sequence", "elements": [prefix, answer]}
    try:
        held = StructuredOutputs.of(structural_tag={"type": "structural_tag", "format": answer})
    except ValueError as error:  # too long, or too deep
        raise InvalidRequestError(
            f"what the answer must look like holds a {error}; shorten the schemas", field="structured_outputs"
        ) from None
    return held.behind(END_THINK) if opened else held


def _thoughts(form: AnswerForm) -> Format | None:
    """The thoughts that may come first; None where there are none."""
    if not form.thinks:
        return None
    text = {"type": "any_text", "excludes": [THINK, END_THINK]}
    return {"type": "optional", "content": tag(THINK, text, END_THINK)}
