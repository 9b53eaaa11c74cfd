"""/v1/responses through the openai client: whole, streamed, and sent back as the next input."""

from typing import Any

import openai
import pytest
from openai.types.responses import Response

from cluster.gateway import GatewayServer
from kernels_integration.errors import CollectiveError
from tests.gateway.test_http import post
from tests.support.scripted_chat import Saying
from tests.support.scripted_group import ScriptedGroup, update
from tests.unit.cluster.test_answer_reader import TOOLS, glm45, glm47

pytestmark = [pytest.mark.gateway, pytest.mark.asyncio(loop_scope="module")]
FLAT = [{"type": "function"} | tool["function"] for tool in TOOLS]
SAID = "<think>Hm, 日本.</think>\nI look. 😀\n" + glm45("get_weather", city='Pa"ris', days="3") + glm47("now")


def without_ids(value: Any) -> Any:
    """The same without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at")}
    return [without_ids(entry) for entry in value] if isinstance(value, list) else value


async def both_ways(client: openai.AsyncOpenAI, **asked: Any) -> Response:
    """The response, which is checked to be that of the stream and what the stream's events add up to."""
    whole = await client.responses.create(**asked)
    events = [event async for event in await client.responses.create(stream=True, **asked)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    streamed = events[-1].response
    assert without_ids(streamed.to_dict()) == without_ids(whole.to_dict())
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == streamed.output
    begun = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert begun == [item.id for item in streamed.output]
    for index, item in enumerate(streamed.output):
        deltas = [
            event.delta
            for event in events
            if event.type.endswith(".delta") and (event.output_index, event.item_id) == (index, item.id)
        ]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(deltas) == text
    return whole


async def test_thoughts_text_and_calls_are_items(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = SAID
    response = await both_ways(
        chat_client,
        model="tiny",
        input="How is the weather?",
        instructions="Be brief.",
        tools=FLAT,
        metadata={"a": "b"},
        temperature=0.5,
    )
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert response.output_text == "I look. 😀"
    assert response.output[0].content[0].text == "Hm, 日本."
    assert (response.output[2].name, response.output[2].arguments) == (
        "get_weather",
        '{"city": "Pa\\"ris", "days": 3}',
    )
    assert (response.temperature, response.metadata, response.instructions) == (0.5, {"a": "b"}, "Be brief.")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert "Be brief." in saying.prompts[-1]


async def test_an_output_is_the_next_input(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = SAID
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "How is the weather?"}]}]
    response = await chat_client.responses.create(model="tiny", input=asked, tools=FLAT)
    asked += [item.to_dict() for item in response.output]
    for call, result in zip(
        response.output[2:], ("rain", [{"type": "input_text", "text": "noon"}]), strict=True
    ):
        asked.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
    saying.text = "It rains at noon."
    response = await both_ways(chat_client, model="tiny", input=asked, tools=FLAT)
    assert response.output_text == saying.text
    prompt = saying.prompts[-1]
    parts = [
        "How is the weather?",
        "<think>Hm, 日本.</think>",
        "I look. 😀",
        "<tool_call>get_weather",
        "rain",
        "noon",
    ]
    places = [prompt.rindex(part) for part in parts]
    assert places == sorted(places)
    assert prompt.count("<|assistant|>") == 2


async def test_a_cut_answer_is_incomplete(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = "a long answer " * 20
    response = await both_ways(chat_client, model="tiny", input="Hi", max_output_tokens=9)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage is not None
    assert response.usage.output_tokens == 9


async def test_an_empty_answer_has_no_items(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = ""
    response = await both_ways(chat_client, model="tiny", input="Hi")
    assert (response.output, response.status) == ([], "completed")


USER = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"input": None}, "input", "input"),
        ({"input": []}, "input", "non-empty list"),
        ({"input": [5]}, "input[0]", "must be an object"),
        ({"input": [{"type": ["x"]}]}, "input[0].type", "must be one of"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "only parts of text",
        ),
        ({"input": [USER, {"role": "nobody", "content": "x"}]}, "input[1].role", "input[1].role is 'nobody'"),
        (
            {"input": [USER, {"type": "function_call", "name": "now", "call_id": "1", "arguments": "{"}]},
            "input[1].arguments",
            "JSON object",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
            "input[0].encrypted_content",
            "unknown",
        ),
        (
            {
                "input": [
                    USER,
                    {"type": "function_call", "name": "now", "call_id": "1", "arguments": "{}"},
                    {"type": "function_call_output", "call_id": "2", "output": "noon"},
                ]
            },
            "input[2].call_id",
            "input[2].call_id is '2'; it must be the id of a call before it: '1'",
        ),
        ({"input": [USER | {"weight": 1}]}, "input[0].weight", "of type message"),
        (
            {"input": [USER | {"content": [{"type": "input_text", "text": "x", "detail": "low"}]}]},
            "input[0].content[0].detail",
            "unknown",
        ),
        ({"tools": [{"type": "function", "name": "f", "foo": 1}]}, "tools[0].foo", "unknown"),
        ({"instructions": 5}, "instructions", "must be text"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"max_tokens": 5}, "max_tokens", "did you mean"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported; leave it out"),
        ({"background": True}, "background", "not supported"),
        ({"reasoning": {"effort": "high"}}, "reasoning", "not supported"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "not supported"),
        ({"truncation": "auto"}, "truncation", 'use "disabled"'),
        ({"text": {"format": {"type": "nothing"}}}, "text.format", "text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "letters"),
        ({"n": 2}, "n", "not supported"),
        ({"input": "\ud800"}, "input", "input holds '\\ud800' at character 0"),
        (
            {"tools": [{"type": "function", "name": "f", "description": "\ud800"}]},
            "tools[0].description",
            "half",
        ),
        ({"metadata": {"a": "\ud800"}, "stream": True}, "metadata.a", "half of a surrogate pair"),
        (
            {"text": {"format": {"type": "json_schema", "name": "\ud800", "schema": {}}}, "stream": True},
            "text.format.name",
            "half of a surrogate pair",
        ),
        ({"model": "gpt-4"}, "model", "tiny"),
    ],
)
async def test_what_is_not_supported_is_named(
    chat_server: GatewayServer, change: dict[str, Any], param: str, words: str
) -> None:
    status, answer, _ = await post(chat_server, "/v1/responses", {"input": "Hi"} | change)
    assert status == (404 if param == "model" else 400)
    assert answer["error"]["param"] == param
    assert words in answer["error"]["message"]


async def test_values_that_ask_for_nothing_are_taken(chat_server: GatewayServer, saying: Saying) -> None:
    saying.text = "Hi"
    neutral = {
        "store": False,
        "background": False,
        "previous_response_id": None,
        "include": [],
        "truncation": "disabled",
        "text": {"format": {"type": "text"}},
        "reasoning": {},
        "metadata": {},
        "user": "me",
        "service_tier": "auto",
        "tool_choice": "auto",
        "tools": [],
        "parallel_tool_calls": True,
    }
    status, answer, _ = await post(chat_server, "/v1/responses", {"input": "Hi"} | neutral)
    assert (status, answer["status"]) == (200, "completed")


async def test_a_failure_on_the_way_is_an_event(config: Any, saying: Saying) -> None:
    group = ScriptedGroup(lambda request: [update(request, [50]), CollectiveError("shard 1 is lost")])
    server = GatewayServer(groups=[group], config=config, frontend=saying.frontend, port=0, http_port=0)
    await server.start()
    try:
        status, text, _ = await post(server, "/v1/responses", {"input": "Hi", "stream": True})
        assert status == 200
        *_, last = text.strip().split("\n\n")
        assert last.startswith("event: error\ndata: {")
        assert "shard 1 is lost" in last
        url = f"http://127.0.0.1:{server.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model="tiny", input="Hi", stream=True)
            events = [event async for event in stream]
        assert events[-1].type == "error"
        assert (events[-1].code, events[-1].message) == ("collective_failed", "shard 1 is lost")
    finally:
        await server.stop(drain_s=0)
