"""What an answer is held to where calls are demanded: the forms that are read back, and nothing else."""

import json

import pytest

from actors.structured_outputs import StructuredOutputs
from cluster.chat.answer_form import AnswerForm
from cluster.chat.answer_grammar import held_answer
from cluster.openai.tools import demanded_tools
from kernels_integration.errors import InvalidRequestError
from tests.unit.cluster.test_answer_reader import (
    BEGIN,
    END,
    FORMS,
    TOOLS,
    V3_CALL,
    V31_CALL,
    dsml,
    glm47,
    invoke,
    read,
    tool,
)

testing = pytest.importorskip("xgrammar.testing")
import xgrammar  # noqa: E402

WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer"})
WEATHER["function"]["parameters"] |= {"required": ["city", "days"], "additionalProperties": False}
TWO = [WEATHER, TOOLS[2]]
ARGUMENTS = '{"city": "Paris 😀", "days": 3}'
CALLS = {
    "v3": f"{BEGIN}{V3_CALL.format('get_weather', ARGUMENTS)}\n{V3_CALL.format('now', '{}')}{END}",
    "v31": f"{BEGIN}{V31_CALL.format('get_weather', ARGUMENTS)}{V31_CALL.format('now', '{}')}{END}",
    "v32": dsml(
        invoke("get_weather", ("city", "true", "Paris 😀"), ("days", "false", "3")),
        invoke("now").replace("\n\n", "\n"),
    ),
    "glm": glm47("get_weather", city="Paris 😀", days="3") + glm47("now"),
}


def accepts(constraint: StructuredOutputs | None, text: str) -> bool:
    assert constraint is not None
    assert constraint.kind == "structural_tag"
    grammar = xgrammar.Grammar.from_structural_tag(constraint.text)
    return bool(testing._is_grammar_accept_string(grammar, text))


@pytest.mark.parametrize("name", FORMS)
def test_demanded_calls_are_those_that_are_read_back(name: str) -> None:
    form = AnswerForm(calls=FORMS[name], thinks=True)
    held = held_answer(form, "<|assistant|></think>", calls=TWO)
    text = CALLS[name]
    assert accepts(held, text)
    assert [call for call, _ in read([text], name).calls] == ["get_weather", "now"]
    for wrong in ("", "Well. " + text, text + " Well.", text[:-3], text.replace("get_weather", "other")):
        assert not accepts(held, wrong), wrong
    assert not accepts(held, text.replace("3", "three"))
    one = held_answer(form, "</think>", calls=TWO, one_call=True)
    assert not accepts(one, text)


@pytest.mark.parametrize("name", FORMS)
def test_thoughts_are_free(name: str) -> None:
    form = AnswerForm(calls=FORMS[name], thinks=True)
    begun = held_answer(form, "<|assistant|><think>", calls=TWO)
    assert accepts(begun, "Hm, { what?</think>" + CALLS[name])
    assert not accepts(begun, CALLS[name])
    either = held_answer(form, "<|assistant|>", calls=TWO)
    assert accepts(either, "<think>Hm</think>" + CALLS[name])
    assert accepts(either, CALLS[name])
    assert not accepts(
        held_answer(AnswerForm(calls=FORMS[name]), "", calls=TWO), "<think></think>" + CALLS[name]
    )


@pytest.mark.parametrize("name", ["glm", "v32"])
def test_a_text_of_bounded_length_ends_at_its_mark(name: str) -> None:
    tools = [tool("f", a={"type": "string", "minLength": 2, "maxLength": 60}, b={"type": "string"})]
    held = held_answer(AnswerForm(calls=FORMS[name]), "", calls=tools)
    end = {"glm": "</arg_value>", "v32": "</｜DSML｜parameter>"}[name]

    def call(value: str) -> str:
        return glm47("f", a=value) if name == "glm" else dsml(invoke("f", ("a", "true", value)))

    for value, is_legal in [("ab", True), ("Zürich 😀, > 3", True), ("a", False), ("x" * 61, False)]:
        assert accepts(held, call(value)) == is_legal, value
    assert not accepts(held, call(f"ab{end}cd"))
    assert read([call("ab")], name).calls == [("f", '{"a": "ab"}')]


CONTENTS = {
    "json": (
        StructuredOutputs.of(json={"type": "object", "properties": {"a": {"type": "integer"}}}),
        '{"a": 1}',
    ),
    "json_object": (StructuredOutputs.of(json_object=True), '{"b": "c"}'),
    "regex": (StructuredOutputs.of(regex="[ab]+"), "abba"),
    "choice": (StructuredOutputs.of(choice=["yes", "no"]), "no"),
    "grammar": (StructuredOutputs.of(grammar='root ::= "x" root | "y"'), "xxy"),
    "structural_tag": (
        StructuredOutputs.of(
            structural_tag={"type": "structural_tag", "format": {"type": "const_string", "value": "tagged"}}
        ),
        "tagged",
    ),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_form_of_the_content_begins_behind_the_thoughts(kind: str) -> None:
    content, text = CONTENTS[kind]
    form = AnswerForm(calls=FORMS["glm"], thinks=True)
    held = held_answer(form, "<think>", content=content)
    assert accepts(held, f"Hm.</think>{text}")
    assert not accepts(held, text)
    assert not accepts(held, "Hm.</think>wrong")
    assert held_answer(form, "</think>", content=content) == content
    assert held_answer(AnswerForm(), "", content=content) == content
    # where tools may be called, either
    both = held_answer(form, "</think>", content=content, calls=TWO)
    assert accepts(both, text)
    assert accepts(both, CALLS["glm"])
    assert not accepts(both, "wrong")


def test_where_nothing_is_demanded_nothing_is_held() -> None:
    assert held_answer(AnswerForm(thinks=True), "<think>") is None


def test_a_tool_without_parameters_takes_none() -> None:
    for name, form in FORMS.items():
        held = held_answer(AnswerForm(calls=form), "", calls=[TOOLS[2]])
        assert held is not None
        assert json.loads(held.text)["type"] == "structural_tag", name


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$ref": "#/$defs/p", "$defs": {"p": {"type": "object"}}}, r"\$ref"),
        ({"anyOf": [{"type": "object", "properties": {"x": {}}}]}, "anyOf"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "required": ["q"]}, "required"),
        ({"type": "array"}, "type"),
    ],
)
def test_parameters_that_a_demanded_call_could_not_be_held_to_are_refused(schema: object, told: str) -> None:
    tools = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    with pytest.raises(InvalidRequestError, match=rf"'a', whose parameters have {told} and no prop"):
        demanded_tools("required", tools)
    assert demanded_tools("auto", tools) == []


@pytest.mark.parametrize(
    ("form", "names"),
    [("glm", ["a<b", "</arg_key>", " a", "a\n", ""]), ("v32", ['a"b', "a>b", "a<", "a\nb", "", "a "])],
)
def test_a_parameter_whose_name_the_form_cannot_carry_is_refused(form: str, names: list[str]) -> None:
    for name in names:
        tools = [tool("f", ok={"type": "string"}, **{name: {"type": "integer"}})]
        with pytest.raises(InvalidRequestError, match=r"'f', whose parameter .* cannot carry") as caught:
            held_answer(AnswerForm(calls=FORMS[form]), "", calls=tools)
        assert caught.value.field == "tools"
        assert held_answer(AnswerForm(calls=FORMS["v31"]), "", calls=tools) is not None  # in JSON it can


@pytest.mark.parametrize("schema", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
def test_a_demanded_call_may_have_no_arguments(schema: object) -> None:
    tools = [{"type": "function", "function": {"name": "a", "parameters": schema}}]
    assert demanded_tools("required", tools) == tools
