"""Tools and thoughts over HTTP, through the openai client: whole and streamed answers say the same."""

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.scripted_chat import Saying
from tests.unit.cluster.test_answer_reader import TOOLS, glm45, glm47

pytestmark = [pytest.mark.gateway, pytest.mark.asyncio(loop_scope="module")]
ASK = [{"role": "user", "content": "How is the weather in Paris? 😀"}]
WEATHER = "\n<think>Hm, 日本.</think>\nI look.\n" + glm45("get_weather", city='Pa"ris 😀', days="3")


async def both_ways(chat_client: openai.AsyncOpenAI, **asked: Any) -> list[dict[str, Any]]:
    """The messages of the choices, with finish_reason, which are checked to be those of the stream."""
    asked = {"model": "tiny", "messages": ASK} | asked
    whole = await chat_client.chat.completions.create(**asked)
    messages = []
    for choice in whole.choices:
        message = choice.message.model_dump(exclude_none=True)
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
        messages.append(
            {
                "content": message.get("content") or "",
                "reasoning": message.get("reasoning_content", ""),
                "calls": calls,
                "finish": choice.finish_reason,
            }
        )
    streamed = [{"content": "", "reasoning": "", "calls": [], "finish": None} for _ in messages]
    ids: set[str] = set()
    async for chunk in await chat_client.chat.completions.create(stream=True, **asked):
        for part in chunk.choices:
            found, delta = streamed[part.index], part.delta
            found["content"] += delta.content or ""
            found["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or ():
                assert call.function is not None
                if call.id is not None:
                    assert call.index == len(found["calls"])
                    assert call.id not in ids
                    ids.add(call.id)
                    found["calls"].append((call.function.name, ""))
                name, arguments = found["calls"][call.index]
                found["calls"][call.index] = (name, arguments + (call.function.arguments or ""))
            found["finish"] = part.finish_reason or found["finish"]
    assert streamed == messages
    return messages


async def test_a_call_with_thoughts_and_content(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = WEATHER
    [message] = await both_ways(chat_client, tools=TOOLS)
    assert message == {
        "content": "I look.",
        "reasoning": "Hm, 日本.",
        "calls": [("get_weather", '{"city": "Pa\\"ris 😀", "days": 3}')],
        "finish": "tool_calls",
    }
    assert '"get_weather"' in saying.prompts[-1]


async def test_arguments_are_streamed_as_they_come(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = glm47("note", text="a long text " * 40)
    pieces = []
    async for chunk in await chat_client.chat.completions.create(
        model="tiny", messages=ASK, tools=TOOLS, stream=True
    ):
        pieces += [c.function.arguments for c in chunk.choices[0].delta.tool_calls or ()]
    assert len(pieces) > 20
    assert json.loads("".join(pieces))["text"] == "a long text " * 40


async def test_choices_are_read_each_by_itself(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = WEATHER + glm47("now")
    messages = await both_ways(chat_client, tools=TOOLS, n=3)
    assert [len(message["calls"]) for message in messages] == [2, 2, 2]
    [one] = await both_ways(chat_client, tools=TOOLS, parallel_tool_calls=False)
    assert [name for name, _ in one["calls"]] == ["get_weather"]


@pytest.mark.parametrize(
    "asked", [{}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}, {"tools": None}]
)
async def test_where_no_tool_may_be_called_nothing_is_a_call(
    chat_client: openai.AsyncOpenAI, saying: Saying, asked: dict[str, Any]
) -> None:
    saying.text = "Well: " + glm47("now")
    [message] = await both_ways(chat_client, **asked)
    assert (message["content"], message["calls"], message["finish"]) == (saying.text, [], "stop")
    assert "get_weather" not in saying.prompts[-1]


async def test_a_call_that_is_cut_ends_by_length(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = glm47("note", text="word " * 50)
    [message] = await both_ways(chat_client, tools=TOOLS, max_tokens=60)
    assert message["finish"] == "length"
    [(name, arguments)] = message["calls"]
    assert name == "note"
    assert arguments.startswith('{"text": "word ')
    with pytest.raises(ValueError, match="Unterminated string"):
        json.loads(arguments)


async def test_log_probabilities_of_all_tokens_come_with_calls(
    chat_client: openai.AsyncOpenAI, saying: Saying
) -> None:
    saying.text = WEATHER
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": TOOLS, "logprobs": True}
    whole = await chat_client.chat.completions.create(**asked)
    assert whole.choices[0].logprobs is not None
    streamed = []
    async for chunk in await chat_client.chat.completions.create(stream=True, **asked):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert streamed == whole.choices[0].logprobs.content
    data = b"".join(bytes(entry.bytes or ()) for entry in streamed)
    assert data.decode().startswith(saying.text)


class GetWeather(BaseModel):
    """The weather of a place."""

    city: str
    days: int


async def test_the_clients_pydantic_tools_parse_the_arguments(
    chat_client: openai.AsyncOpenAI, saying: Saying
) -> None:
    saying.text = glm47("GetWeather", city="Oslo", days="2")
    tools = [openai.pydantic_function_tool(GetWeather)]
    parsed = await chat_client.chat.completions.parse(model="tiny", messages=ASK, tools=tools)
    [call] = parsed.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Oslo", days=2)
    async with chat_client.chat.completions.stream(model="tiny", messages=ASK, tools=tools) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    [call] = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == GetWeather(city="Oslo", days=2)


CALL = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
HISTORIES = {
    "empty tool_calls": [*ASK, {"role": "assistant", "content": "Hi", "tool_calls": []}, ASK[0]],
    "null tool_calls": [*ASK, {"role": "assistant", "content": "Hi", "tool_calls": None}, ASK[0]],
    "a developer": [{"role": "developer", "content": "Be brief."}, *ASK],
    "content as parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    "a tool's content as parts": [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "noon"}]},
    ],
    "arguments as an object": [
        *ASK,
        {
            "role": "assistant",
            "tool_calls": [CALL | {"function": {"name": "note", "arguments": {"text": "x 😀"}}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noted"},
    ],
    "an answer of ours sent back": [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning_content": "Hm.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ],
}


@pytest.mark.parametrize("name", HISTORIES)
async def test_histories_that_other_servers_have_stumbled_over(
    chat_client: openai.AsyncOpenAI, saying: Saying, name: str
) -> None:
    saying.text = "Yes. 😀👍🏽"
    [message] = await both_ways(chat_client, messages=HISTORIES[name], tools=TOOLS)
    assert message == {"content": saying.text, "reasoning": "", "calls": [], "finish": "stop"}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": {}}, "tools", "must be a list"),
        ({"tools": [5]}, "tools[0].type", "is of type 5"),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0].type",
            "'web_search'; it must be an object of type function",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "tools[0].function.name",
            "1 to 256 letters",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
            "tools[0].function.parameters",
            "JSON schema",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"properties": []}}}]},
            "tools[0].function.parameters.properties",
            "an object of JSON schemas",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a"}, "x": 1}]},
            "tools[0].x",
            "a tool may hold type, function",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "params": {}}}]},
            "tools[0].function.params",
            "may hold name, description, parameters, strict",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "strict": "yes"}}]},
            "tools[0].function.strict",
            "true or false",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "description": 5}}]},
            "tools[0].function.description",
            "must be text",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}, "x": 1}},
            "tool_choice.x",
            "unknown",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].function.name", "a name of its own"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "auto, none, required"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "none of the tools",
        ),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "'no'"),
        ({"functions": [{}]}, "functions", "unknown"),
    ],
)
async def test_wrong_tools_are_named(
    chat_client: openai.AsyncOpenAI, change: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await chat_client.chat.completions.create(model="tiny", messages=ASK, extra_body=change)
    assert refused.value.param == param
    assert words in refused.value.message


async def test_a_model_whose_calls_nobody_can_read_gets_no_tools(
    chat_client: openai.AsyncOpenAI, saying: Saying
) -> None:
    form, saying.frontend.answer_form = (
        saying.frontend.answer_form,
        replace(saying.frontend.answer_form, calls=None),
    )
    try:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await chat_client.chat.completions.create(model="tiny", messages=ASK, tools=TOOLS)
    finally:
        saying.frontend.answer_form = form
