"""DeepSeek-V3.2's form of a chat, against vectors written by hand.

Facts: deepseek-ai/DeepSeek-V3.2, folder encoding: the example in its README (hello, 1+1=?), and its test
vector test_output.txt (also in ai-dynamo/dynamo, lib/llm/tests/data/deepseek-v3.2), from which the block
about tools in deepseek_v32_tools.txt is taken, and whose course the tool loop here follows, with other words.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.chat.messages import checked_messages
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from cluster.tokenizer.deepseek_v32_encoding import DeepseekV32Encoding
from kernels_integration.errors import InvalidRequestError

TOOLS_BLOCK = (Path(__file__).parent / "deepseek_v32_tools.txt").read_text(encoding="utf-8")
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "time",
            "description": "Die Zeit — jetzt",
            "parameters": {
                "type": "object",
                "properties": {"zone": {"type": "string"}},
                "required": ["zone"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
    },
]


def encode(messages: list[dict[str, Any]], tools: Any = None, **settings: bool) -> str:
    return DeepseekV32Encoding(**settings).encode(checked_messages(messages), tools=tools)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


README = [
    user("hello"),
    {"role": "assistant", "content": "Hello! I am DeepSeek.", "reasoning_content": "thinking..."},
]


@pytest.mark.parametrize(("thinking", "end"), [(True, "<think>"), (False, "</think>")])
def test_the_readmes_example(thinking: bool, end: str) -> None:
    assert encode([*README, user("1+1=?")], thinking=thinking) == (
        "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>Hello! I am DeepSeek."
        "<｜end▁of▁sentence｜>"
        "<｜User｜>1+1=?<｜Assistant｜>" + end
    )


def test_thoughts_are_shown_after_the_last_user_only_and_with_thinking_only() -> None:
    assert encode(README, thinking=True) == (
        "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜><think>thinking...</think>Hello! I am DeepSeek."
        "<｜end▁of▁sentence｜>"
    )
    assert encode(README) == (
        "<｜begin▁of▁sentence｜><｜User｜>hello<｜Assistant｜></think>Hello! I am DeepSeek."
        "<｜end▁of▁sentence｜>"
    )
    vllms_name = [README[0], {"role": "assistant", "content": "x", "reasoning": "hm"}]
    assert encode(vllms_name, thinking=True).endswith("<think>hm</think>x<｜end▁of▁sentence｜>")


LOOP = [
    {"role": "system", "content": "You help."},
    user("When?"),
    {
        "role": "assistant",
        "reasoning_content": "First the time.",
        "tool_calls": [call("time", '{"zone": "UTC"}')],
    },
    {"role": "tool", "content": '{"now": 1}'},
    {
        "role": "assistant",
        "reasoning_content": "Now search.",
        "tool_calls": [
            call("search", '{"words": ["é", 1], "deep": true, "n": 2, "text": "[1]", "none": null}'),
            call("time", {}),
        ],
    },
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "At noon.", "reasoning_content": "All there."},
    user("Thanks! And then?"),
    {
        "role": "assistant",
        "content": "Wait.",
        "reasoning_content": "Again.",
        "tool_calls": [call("search", "{}")],
    },
    {"role": "tool", "content": "three"},
]
CALL_1 = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="time">\n'
    '<｜DSML｜parameter name="zone" string="true">UTC</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls><｜end▁of▁sentence｜>"
    '\n\n<function_results>\n<result>{"now": 1}</result>\n</function_results>\n\n'
)
CALL_2 = (
    "\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="search">\n'
    '<｜DSML｜parameter name="words" string="false">["é", 1]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="deep" string="false">true</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="text" string="true">[1]</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="none" string="false">null</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="time">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls><｜end▁of▁sentence｜>"
    "\n\n<function_results>\n<result>one</result>\n<result>two</result>\n</function_results>\n\n"
)
CALL_3 = (
    "Wait.\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="search">\n\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls><｜end▁of▁sentence｜>"
    "\n\n<function_results>\n<result>three</result>\n</function_results>"
)
BEGIN = "<｜begin▁of▁sentence｜>You help." + TOOLS_BLOCK + "<｜User｜>When?<｜Assistant｜>"


def test_a_tool_loop_of_two_turns() -> None:
    past = BEGIN + "</think>" + CALL_1 + "</think>" + CALL_2 + "</think>At noon.<｜end▁of▁sentence｜>"
    now = "<｜User｜>Thanks! And then?<｜Assistant｜>"
    assert encode(LOOP, TOOLS, thinking=True) == past + now + "<think>Again.</think>" + CALL_3 + "\n\n<think>"
    assert encode(LOOP, TOOLS) == past + now + "</think>" + CALL_3 + "\n\n</think>"
    assert encode(LOOP, TOOLS, add_generation_prompt=False) == past + now + "</think>" + CALL_3
    assert encode(LOOP[:9], TOOLS, add_generation_prompt=False) == past + "<｜User｜>Thanks! And then?"


def test_a_loop_that_still_runs_shows_all_its_thoughts() -> None:
    assert encode(LOOP[:7], TOOLS, thinking=True) == (
        BEGIN + "<think>First the time.</think>" + CALL_1 + "<think>Now search.</think>" + CALL_2 + "<think>"
    )


def test_tools_stand_behind_the_first_systems_or_developers_text() -> None:
    bos = "<｜begin▁of▁sentence｜>"
    assert encode([user("x")], TOOLS) == bos + TOOLS_BLOCK + "<｜User｜>x<｜Assistant｜></think>"
    own = {"role": "system", "content": "S", "tools": TOOLS}
    assert encode([own, user("x")]) == bos + "S" + TOOLS_BLOCK + "<｜User｜>x<｜Assistant｜></think>"
    assert encode([own, user("x")], TOOLS[:1]).count("## Tools") == 1
    assert '"name": "search"' not in encode([own, user("x")], TOOLS[:1])
    developer = {"role": "developer", "content": "Do."}
    assert encode([developer], TOOLS, thinking=True) == (
        bos + "<｜User｜>" + TOOLS_BLOCK + "\n\n# The user's message is: Do.<｜Assistant｜><think>"
    )


def test_a_response_format_is_part_of_a_message() -> None:
    schema = {"type": "object", "title": "é"}
    system = {"role": "system", "content": "S", "response_format": schema}
    assert encode([system, user("x")]).startswith(
        "<｜begin▁of▁sentence｜>S\n\n## Response Format:\n\n"
        "You MUST strictly adhere to the following schema to reply:\n"
        '{"type": "object", "title": "é"}<｜User｜>x'
    )


def test_developers_before_the_last_user_are_left_out_with_thinking() -> None:
    chat = [{"role": "developer", "content": "D"}, {"role": "assistant", "content": "A"}, user("x")]
    last = "A<｜end▁of▁sentence｜><｜User｜>x<｜Assistant｜><think>"
    assert encode(chat, thinking=True) == "<｜begin▁of▁sentence｜>" + last
    kept = "<｜User｜>\n\n# The user's message is: D<｜Assistant｜></think>"
    assert encode(chat, thinking=True, drop_thinking=False) == "<｜begin▁of▁sentence｜>" + kept + last
    assert kept in encode(chat)


def test_an_answer_that_the_model_shall_go_on_with() -> None:
    chat = [user("x"), {"role": "assistant", "content": "Well", "prefix": True}]
    assert encode(chat).endswith("<｜Assistant｜></think>Well")


@pytest.mark.parametrize(
    ("messages", "tools", "field", "words"),
    [
        ([user("x"), {"role": "tool", "content": "r"}], None, "messages[1]", "result 1 of the 0 tools"),
        ([*LOOP[:4], LOOP[3]], None, "messages[4]", "result 2 of the 1 tools"),
        (LOOP[:6], None, "messages", "1 results for 2 tool_calls"),
        ([*LOOP[:6], user("x")], None, "messages", "before messages[6] there are 1 results"),
        ([{"role": "developer", "content": ""}], None, "messages[0].content", "must hold text"),
        ([user("x")], [{"name": "f"}], "tools", "must be an object of type function"),
        (
            [user("x"), {"role": "assistant", "content": "y"}],
            None,
            "messages[1].reasoning_content",
            "reasoning_content or tool_calls",
        ),
        (
            [user("x"), {"role": "assistant", "content": "", "tool_calls": [call("f", "[]")]}],
            None,
            "messages[1].tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
    ],
)
def test_chats_that_the_form_cannot_hold_are_refused(
    messages: list[dict[str, Any]], tools: Any, field: str, words: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        encode(messages, tools, thinking=True)
    assert caught.value.field == field
    assert words in str(caught.value)


@pytest.fixture
def frontend(tmp_path: Path) -> ModelFrontend:
    """A checkpoint of deepseek_v32 without a template."""
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).symlink_to(BUNDLED_CHECKPOINT / name)
    config = json.loads((BUNDLED_CHECKPOINT / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return ModelFrontend.from_pretrained(tmp_path, served_model_name="ds", max_model_len=2048)


@pytest.mark.parametrize(
    ("kwargs", "end"),
    [
        (None, "</think>"),
        ({"thinking": True}, "<think>"),
        ({"enable_thinking": True}, "<think>"),
        ({"thinking": False, "drop_thinking": False}, "</think>"),
    ],
)
def test_thinking_is_an_argument_of_the_template(frontend: ModelFrontend, kwargs: Any, end: str) -> None:
    ids = frontend.render_chat([user("Hi")], chat_template_kwargs=kwargs)
    text = frontend.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜>" + end


@pytest.mark.parametrize("kwargs", [{"thinkng": True}, {"thinking": "yes"}, {"thinking": 1}])
def test_other_arguments_are_refused(frontend: ModelFrontend, kwargs: Any) -> None:
    with pytest.raises(InvalidRequestError, match="thinking, enable_thinking, drop_thinking") as caught:
        frontend.render_chat([user("Hi")], chat_template_kwargs=kwargs)
    assert caught.value.field == "chat_template_kwargs"
