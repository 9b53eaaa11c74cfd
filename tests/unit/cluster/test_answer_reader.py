"""Thoughts and calls of tools in the forms of released models, whole and in every way to cut the text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.chat.answer_form import AnswerForm
from cluster.chat.answer_parts import CallArguments, CallBegins, Content, Part, Reasoning
from cluster.chat.answer_reader import AnswerReader
from cluster.chat.call_forms import DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, GLM
from cluster.chat.reasoning import opens_thoughts

FORMS = {"v3": DEEPSEEK_V3, "v31": DEEPSEEK_V31, "v32": DEEPSEEK_V32, "glm": GLM}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
    }


TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}, tags={"type": "array"}),
    tool("note", text={"type": "string"}, maybe={"type": ["string", "null"]}, any={}),
    tool("now"),
    tool("pick", unit={"enum": ["C", "F"]}, other={"type": "string", "enum": ["C"]}, size={"enum": [1, 2]}),
]


ODD = tool("odd", number={"type": 5}, list={"type": [["x"]]}, choice={"enum": 5}, other=7)


@dataclass
class Answer:
    """Parts, joined."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def take(self, parts: Sequence[Part]) -> "Answer":
        for part in parts:
            match part:
                case Reasoning():
                    self.reasoning += part.text
                case Content():
                    self.content += part.text
                case CallBegins():
                    self.calls.append((part.name, ""))
                case CallArguments():
                    name, arguments = self.calls[-1]
                    self.calls[-1] = (name, arguments + part.text)
        return self


def read(pieces: Sequence[str], form: str, *, opened: bool = False, thinks: bool = True) -> Answer:
    reader = AnswerReader(
        AnswerForm(calls=FORMS[form], thinks=thinks), opened=opened, tools=[*TOOLS, ODD] if form else None
    )
    answer = Answer()
    for piece in pieces:
        answer.take(reader.push(piece))
    return answer.take(reader.finish())


V3_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V31_CALL = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
PARIS, OSLO = '{"city": "Paris", "days": 3}', '{"city": "Oslo 😀"}'
DSML = "<｜DSML｜"
END_DSML = "</｜DSML｜"


def dsml(*invokes: str) -> str:
    return f"{DSML}function_calls>\n" + "\n".join(invokes) + f"\n{END_DSML}function_calls>"


def invoke(name: str, *parameters: tuple[str, str, str]) -> str:
    lines = [
        f'{DSML}parameter name="{key}" string="{kind}">{value}{END_DSML}parameter>'
        for key, kind, value in parameters
    ]
    return f'{DSML}invoke name="{name}">\n' + "\n".join(lines) + f"\n{END_DSML}invoke>"


def glm45(name: str, **values: str) -> str:
    lines = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items()]
    return f"<tool_call>{name}\n" + "".join(lines) + "</tool_call>"


def glm47(name: str, **values: str) -> str:
    return glm45(name, **values).replace("\n<arg", "<arg").replace("\n</tool", "</tool")


WHOLE = {
    "no call": (
        "v31",
        "Just text with a < and a <think in it.",
        Answer("", "Just text with a < and a <think in it."),
    ),
    "v3": (
        "v3",
        f"Let me see.\n\n{BEGIN}{V3_CALL.format('get_weather', PARIS)}{END}",
        Answer("", "Let me see.", [("get_weather", PARIS)]),
    ),
    "v3 twice": (
        "v3",
        f"{BEGIN}{V3_CALL.format('get_weather', PARIS)}\n{V3_CALL.format('get_weather', OSLO)}{END}",
        Answer("", "", [("get_weather", PARIS), ("get_weather", OSLO)]),
    ),
    "v31": (
        "v31",
        f"{BEGIN}{V31_CALL.format('get_weather', PARIS)}{END}",
        Answer("", "", [("get_weather", PARIS)]),
    ),
    "v31 twice": (
        "v31",
        f"Both.{BEGIN}{V31_CALL.format('now', '{}')}{V31_CALL.format('get_weather', OSLO)}{END} Done.",
        Answer("", "Both. Done.", [("now", "{}"), ("get_weather", OSLO)]),
    ),
    "v31 without arguments": (
        "v31",
        f"{BEGIN}{V31_CALL.format('now', '')}{END}",
        Answer("", "", [("now", "{}")]),
    ),
    "v31 forgets an end": (
        "v31",
        f"{BEGIN}<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}{END}",
        Answer("", "", [("get_weather", PARIS)]),
    ),
    "v31 after thoughts": (
        "v31",
        f"<think>\nHm 日本.\n</think>\n\nI ask.{BEGIN}{V31_CALL.format('now', '{}')}{END}",
        Answer("Hm 日本.", "I ask.", [("now", "{}")]),
    ),
    "v32": (
        "v32",
        "I look.\n\n" + dsml(invoke("get_weather", ("city", "true", 'A "b"\n\\ 😀'), ("days", "false", "3"))),
        Answer("", "I look.", [("get_weather", '{"city": "A \\"b\\"\\n\\\\ 😀", "days": 3}')]),
    ),
    "v32 twice": (
        "v32",
        dsml(invoke("now"), invoke("note", ("any", "false", '{"a": [1, 2]}'))),
        Answer("", "", [("now", "{}"), ("note", '{"any": {"a": [1, 2]}}')]),
    ),
    "v32 no JSON": (
        "v32",
        dsml(invoke("note", ("any", "false", "NaN"))),
        Answer("", "", [("note", '{"any": "NaN"}')]),
    ),
    "glm45": (
        "glm",
        "\n<think>Hm.</think>\nI look.\n" + glm45("get_weather", city="Paris", days="3", tags='["a"]'),
        Answer("Hm.", "I look.", [("get_weather", '{"city": "Paris", "days": 3, "tags": ["a"]}')]),
    ),
    "glm47": (
        "glm",
        glm47("get_weather", city="5", days="3") + glm47("now"),
        Answer("", "", [("get_weather", '{"city": "5", "days": 3}'), ("now", "{}")]),
    ),
    "glm types": (
        "glm",
        glm47("note", text="null", maybe="null", any="5")
        + "\n"
        + glm47("note", maybe="5", any="five", other=" x "),
        Answer(
            "",
            "",
            [
                ("note", '{"text": "null", "maybe": null, "any": 5}'),
                ("note", '{"maybe": "5", "any": "five", "other": " x "}'),
            ],
        ),
    ),
    "glm choices": (
        "glm",
        glm47("pick", unit=" C\n", other="D ", size="2"),
        Answer("", "", [("pick", '{"unit": "C", "other": "D ", "size": 2}')]),
    ),
    "v32 choices": (
        "v32",
        dsml(invoke("pick", ("unit", "true", " C"), ("other", "true", " D"), ("size", "false", " 2 "))),
        Answer("", "", [("pick", '{"unit": "C", "other": " D", "size": 2}')]),
    ),
    "glm unknown tool": ("glm", glm47("other", x="1"), Answer("", "", [("other", '{"x": 1}')])),
    "empty thoughts": ("glm", "<think></think>\nHi", Answer("", "Hi")),
    "thoughts alone": (
        "glm",
        "<think>Hm. <tool_call>now</tool_call>",
        Answer("Hm. <tool_call>now</tool_call>", ""),
    ),
}
WHOLE["glm of schemas that say nothing"] = (
    "glm",
    glm47("odd", number="5", list="[5]", choice="x", other="y"),
    Answer("", "", [("odd", '{"number": 5, "list": [5], "choice": "x", "other": "y"}')]),
)
MALFORMED = {
    "v31 no name": ("v31", f"{BEGIN}<｜tool▁call▁begin｜><｜tool▁sep｜>{{}}{END}"),
    "v31 no JSON": ("v31", f"{BEGIN}{V31_CALL.format('now', '[1]')}{END}"),
    "v31 nothing": ("v31", f" {BEGIN}{END}"),
    "v31 cut in its name": ("v31", f"Hi\n{BEGIN}<｜tool▁call▁begin｜>get_wea"),
    "v3 in the form of v31": ("v3", f"{BEGIN}{V31_CALL.format('now', '{}')}{END}"),
    "v32 no name": ("v32", f"{DSML}function_calls>\n{DSML}invoke name=>\n"),
    "v32 cut": ("v32", f'a\n\n{DSML}function_calls>\n{DSML}invoke name="now">\n{DSML}param'),
    "glm no name": ("glm", "x <tool_call></tool_call> y"),
    "glm JSON": ("glm", '<tool_call>{"name": "now"}</tool_call>'),
    "glm cut": ("glm", "x\n\n<tool_call>now\n<arg_key>a</arg_"),
    "glm spaces": ("glm", "a" + " " * 200 + "<tool_call>" + " " * 200 + "now</tool_call>" + "\n" * 100),
    "glm long name": ("glm", "<tool_call>" + "n" * 300 + "</tool_call>"),
    "a mark alone": ("glm", "a <tool_call> b <tool_call> c {</tool_call>"),
}
CUT = {
    "v31": ("v31", f'{BEGIN}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{"a": 1', [("now", '{"a": 1')], ""),
    "v31 in its end": (
        "v31",
        f"{BEGIN}<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁c",
        [("now", "{}")],
        "",
    ),
    "v32 text": (
        "v32",
        f'{DSML}function_calls>\n{DSML}invoke name="note">\n{DSML}parameter name="text" string="true">Hel',
        [("note", '{"text": "Hel')],
        "",
    ),
    "glm number": (
        "glm",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>12",
        [("get_weather", '{"days": 12')],
        "",
    ),
    "glm between": (
        "glm",
        "<tool_call>note<arg_key>text</arg_key><arg_value>a</arg_value><arg_key>an",
        [("note", '{"text": "a"')],
        "",
    ),
    "glm malformed after a value": (
        "glm",
        "<tool_call>note<arg_key>text</arg_key><arg_value>a</arg_value>what</tool_call>",
        [("note", '{"text": "a"}')],
        "what</tool_call>",
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_calls_and_thoughts_are_read(name: str) -> None:
    form, text, expected = WHOLE[name]
    found = read([text], form)
    assert found == expected
    for _, arguments in found.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_no_call_stays_content(name: str) -> None:
    form, text = MALFORMED[name]
    assert read([text], form) == Answer("", text)


@pytest.mark.parametrize("name", CUT)
def test_a_call_that_is_cut_has_cut_arguments(name: str) -> None:
    form, text, calls, content = CUT[name]
    assert read([text], form) == Answer("", content, calls)


@pytest.mark.parametrize("name", [name for name, (_, _, answer) in WHOLE.items() if answer.calls])
def test_a_cut_anywhere_lets_no_mark_into_arguments(name: str) -> None:
    """What has come of arguments is the beginning of the whole ones, or that and a value without quotes."""
    form, text, whole = WHOLE[name]
    for end in range(len(text)):
        cut = read([text[:end]], form)
        for (tool, arguments), (_, expected) in zip(cut.calls, whole.calls, strict=False):
            before_value, _, value = arguments.rpartition(": ")
            assert expected.startswith(arguments) or value in text[:end], (end, tool)
            assert expected.startswith(before_value)
            assert not any(mark in arguments for mark in ("<arg", "</arg", "<｜", "</｜", "```")), end


ALL = [(form, text) for form, text, *_ in (*WHOLE.values(), *MALFORMED.values(), *CUT.values())]


@pytest.mark.parametrize(("form", "text"), ALL)
def test_every_character_by_itself_gives_the_same(form: str, text: str) -> None:
    assert read(list(text), form) == read([text], form)
    assert read(list(text), form, opened=True) == read([text], form, opened=True)


FRAGMENTS = [
    *(
        BEGIN,
        END,
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
        "function",
        "\n```json\n",
        "\n```",
    ),
    *(
        "now",
        "get_weather",
        "{",
        "}",
        '{"city": "Oslo"}',
        "<think>",
        "</think>",
        " ",
        "\n",
        "\n\n",
        "😀",
        "日本",
        "`",
    ),
    *(
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "city",
        "days",
        "3",
    ),
    *(
        f"{DSML}function_calls>",
        f"{END_DSML}function_calls>",
        f'{DSML}invoke name="now">',
        f"{END_DSML}invoke>",
    ),
    *(
        f'{DSML}parameter name="city" string="true">',
        f"{END_DSML}parameter>",
        "text",
        "<",
        "｜",
        '"',
        "\\",
        " " * 70,
    ),
]


@pytest.mark.slow
@given(data=st.data(), form=st.sampled_from(list(FORMS)), opened=st.booleans(), thinks=st.booleans())
@settings(max_examples=400, deadline=None)
def test_random_texts_give_the_same_however_they_are_cut(
    data: st.DataObject, form: str, opened: bool, thinks: bool
) -> None:
    """Parts of released texts, in random order and cut at random places."""
    known = [text for of, text in ALL if of == form]
    pieces = data.draw(st.lists(st.sampled_from([*FRAGMENTS, *known]), max_size=12))
    text = "".join(pieces)
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    cut = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]
    whole = read([text], form, opened=opened, thinks=thinks)
    assert read(cut, form, opened=opened, thinks=thinks) == whole


@given(st.text(alphabet="ab <>\n😀/", max_size=60))
def test_a_text_without_marks_is_content_to_the_letter(text: str) -> None:
    for form in FORMS:
        assert read([text], form) == Answer("", text)


def test_without_tools_nothing_is_taken_for_a_call() -> None:
    text = glm45("now")
    reader = AnswerReader(AnswerForm(calls=GLM, thinks=True))
    assert Answer().take(reader.push(text) + reader.finish()) == Answer("", text)


def test_one_call_ends_the_answer() -> None:
    text = "a" + glm45("now") + " and " + glm45("note", text="x")
    for pieces in ([text], list(text)):
        reader = AnswerReader(AnswerForm(calls=GLM), tools=TOOLS, one_call=True)
        answer = Answer()
        for piece in pieces:
            answer.take(reader.push(piece))
        assert answer.take(reader.finish()) == Answer("", "a", [("now", "{}")])


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|user|>Hi<|assistant|><think>", True),
        ("<｜Assistant｜><think>\n", True),
        ("<｜Assistant｜></think>", False),
        ("<|assistant|>\n<think></think>", False),
        ("<|user|><think><|assistant|>", False),
    ],
)
def test_a_prompt_tells_whether_the_thoughts_have_begun(prompt: str, opened: bool) -> None:
    assert opens_thoughts(prompt) == opened


def test_long_answers_take_time_in_proportion_to_their_length() -> None:
    """By the characters that are looked at again, not by a clock."""
    text = glm47("note", text="x" * 3000, any="y" * 3000) + "\n" * 3000
    reader = AnswerReader(AnswerForm(calls=GLM, thinks=True), tools=TOOLS)
    longest = 0
    for letter in text[:3000]:
        reader.push(letter)
        longest = max(longest, len(reader._incoming.text))
    assert longest < 400  # a text is passed on as it comes
