"""Which form of answers a checkpoint has."""

from pathlib import Path

import pytest

from cluster.chat.answer_form import answer_form
from cluster.chat.call_forms import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, GLM
from cluster.tokenizer.deepseek_v32_encoding import MARKS
from tests.support.groups import load_tokenizer

TEMPLATES = Path(__file__).parent / "templates"
V31 = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments + '</think>' }}"


@pytest.mark.parametrize(
    ("source", "calls", "thinks"),
    [
        ((TEMPLATES / "deepseek_v3_style.jinja").read_text(), DEEPSEEK_V3, True),
        ((TEMPLATES / "glm_style.jinja").read_text(), GLM, True),
        (V31, DEEPSEEK_V31, True),
        (MARKS, DEEPSEEK_V32, True),
        ("{{ messages }}", None, False),
        (None, None, False),
    ],
)
def test_the_template_tells_the_form(source: str | None, calls: object, thinks: bool) -> None:
    form = answer_form(source, load_tokenizer())
    assert (form.calls, form.thinks, form.has_special_marks) == (calls, thinks, False)


def test_the_user_may_name_it() -> None:
    form = answer_form(None, load_tokenizer(), tool_call_parser="glm47", reasoning_parser="deepseek_r1")
    assert (form.calls, form.thinks) == (GLM, True)
    off = answer_form(MARKS, load_tokenizer(), tool_call_parser="none", reasoning_parser="none")
    assert (off.calls, off.thinks) == (None, False)


def test_marks_that_are_special_tokens_must_not_be_left_out_of_texts() -> None:
    tokenizer = load_tokenizer()
    tokenizer.add_special_tokens(["<tool_call>"])
    assert answer_form("<arg_key>", tokenizer).has_special_marks
    assert not answer_form(MARKS, tokenizer).has_special_marks
