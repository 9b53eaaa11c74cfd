"""Calls that are demanded, of a real model that was never taught any: the grammar makes them."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from cluster.gateway import GatewayServer
from tests.gateway.conftest import GLM
from tests.support.groups import group_config
from tests.support.inline_client import InlineClient
from tests.support.scripted_chat import chat_frontend

pytest.importorskip("xgrammar")
pytestmark = pytest.mark.gateway
ASK = [{"role": "user", "content": "How is the weather?"}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("get_weather", city={"enum": ["Oslo", "Paris"]}, days={"enum": [1, 2]})
SWITCH = tool("switch", on={"type": "boolean"})


@pytest.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    config = group_config(num_speculative_tokens=3, max_model_len=1024)
    model = InlineClient(config)
    frontend = chat_frontend(str(GLM), reasoning_parser="none")
    server = GatewayServer(groups=[model], config=config, frontend=frontend, port=0, http_port=0)
    await server.start()
    url = f"http://127.0.0.1:{server.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
    await server.stop(drain_s=0)
    await asyncio.to_thread(model.close)


class Place(BaseModel):
    """What a client parses."""

    capital: bool
    size: int


async def test_demanded_calls_and_forms(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [WEATHER, SWITCH], "max_tokens": 200}
    for seed in range(2):
        answer = await client.chat.completions.create(
            **asked, tool_choice="required", parallel_tool_calls=False, seed=seed, temperature=1.0
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        values = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert (values["city"] in ("Oslo", "Paris"), values["days"] in (1, 2)) == (True, True)
        else:
            assert isinstance(values["on"], bool)
    named = {"type": "function", "function": {"name": "get_weather"}}
    chunks = await client.chat.completions.create(**asked, tool_choice=named, temperature=0, stream=True)
    arguments, names, reason = "", [], None
    async for chunk in chunks:
        for part in chunk.choices[0].delta.tool_calls or ():
            names += [part.function.name] if part.function.name else []
            arguments += part.function.arguments or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (names, reason) == (["get_weather"], "tool_calls")
    assert set(json.loads(arguments)) == {"city", "days"}

    parsed = await client.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Place, temperature=0, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)
    response = await client.responses.create(
        model="tiny",
        input="How is the weather?",
        tools=[{"type": "function"} | WEATHER["function"]],
        tool_choice={"type": "function", "name": "get_weather"},
        max_output_tokens=200,
    )
    assert [item.type for item in response.output] == ["function_call"]


async def test_what_cannot_be_held_is_named(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": ASK, "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match="send one of them") as refused:
        await client.chat.completions.create(**asked, tools=[SWITCH], response_format={"type": "json_object"})
    assert refused.value.param == "tool_choice"
    unheld = tool("f", x={"not": {"type": "string"}})
    with pytest.raises(openai.BadRequestError, match="tool_choice demands calls of tools") as refused:
        await client.chat.completions.create(**asked, tools=[SWITCH, unheld])
    assert refused.value.param == "tools[1].function.parameters"
    assert "(at /properties/x)" in refused.value.message
    asked["tool_choice"] = "auto"
    with pytest.raises(openai.BadRequestError, match="not is not enforced") as refused:
        await client.chat.completions.create(
            **asked, tools=[SWITCH, unheld], response_format={"type": "json_object"}
        )
    assert refused.value.param == "tools[1].function.parameters"
    with pytest.raises(openai.BadRequestError, match="not is not enforced") as refused:
        await client.responses.create(
            model="tiny",
            input="How is the weather?",
            tools=[{"type": "function"} | unheld["function"]],
            tool_choice="required",
        )
    assert refused.value.param == "tools[0].parameters"
    no_schema = tool("g", x=5)
    with pytest.raises(openai.BadRequestError, match="tool_choice demands calls of tools") as refused:
        await client.chat.completions.create(**asked | {"tool_choice": "required"}, tools=[no_schema])
    assert refused.value.param == "tools"
