"""How a model writes answers: whether it thinks, and how it calls tools. Chosen by its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import tokenizers

from cluster.chat.call_forms import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, GLM, CallForm
from cluster.chat.reasoning import END_THINK, THINK

ToolCallParser = Literal["auto", "none", "deepseek_v3", "deepseek_v31", "deepseek_v32", "glm45", "glm47"]
ReasoningParser = Literal["auto", "none", "deepseek_r1", "deepseek_v3", "glm45"]

_CALL_FORMS: Mapping[str, CallForm] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "glm45": GLM,
    "glm47": GLM,
}
"""By vLLM's names. GLM-4.7's form is GLM-4.5's without line breaks, which are allowed and not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """calls: None where no form is known. thinks: thoughts are between <think> and </think>.

    has_special_marks: the tokenizer takes a mark for a special token, which texts leave out unless asked.
    """

    calls: CallForm | None = None
    thinks: bool = False
    has_special_marks: bool = False


def answer_form(
    template: str | None,
    tokenizer: tokenizers.Tokenizer,
    *,
    tool_call_parser: ToolCallParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
) -> AnswerForm:
    """template: the source of the chat template, or marks that an encoding writes; None: there is none.

    auto: by the marks that the template writes. All reasoning parsers read the same form.
    """
    source = template or ""
    found = _name_of_form(source) if tool_call_parser == "auto" else tool_call_parser
    calls = _CALL_FORMS.get(found)
    thinks = END_THINK in source if reasoning_parser == "auto" else reasoning_parser != "none"
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    marks = {*(calls.marks if calls else ()), *((THINK, END_THINK) if thinks else ())}
    return AnswerForm(calls=calls, thinks=thinks, has_special_marks=bool(marks & special))


def _name_of_form(source: str) -> str:
    if "｜DSML｜" in source:
        return "deepseek_v32"
    if "<｜tool▁calls▁begin｜>" in source:
        return "deepseek_v3" if "```json" in source else "deepseek_v31"
    return "glm45" if "<arg_key>" in source else "none"
