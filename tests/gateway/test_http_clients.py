"""Clients that nobody here wrote, beside the asyncio client that the other tests use."""

import asyncio
import json
from typing import Any

import openai
import pytest

from cluster.gateway import GatewayServer
from tests.support import client_programs, peers
from tests.support.scripted_chat import Saying
from tests.unit.cluster.test_answer_reader import glm45

pytestmark = [pytest.mark.gateway, pytest.mark.asyncio(loop_scope="module")]
SAID = "<think>Hm.</think>I look.\n" + glm45("get_weather", city="Oslo 😀")
CALLS = [["get_weather", {"city": "Oslo 😀"}]]


async def run(program: str, server: GatewayServer) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        peers.python_of_clients(),
        client_programs.__file__,
        program,
        f"http://127.0.0.1:{server.http_port}/v1",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()[-4000:]
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    return found


async def test_litellm(chat_server: GatewayServer, saying: Saying) -> None:
    saying.text = SAID
    expected = {"content": "I look.", "reasoning": "Hm.", "calls": CALLS, "finish": "tool_calls"}
    assert await run("litellm", chat_server) == {"whole": expected, "streamed": expected}


async def test_langchain(chat_server: GatewayServer, saying: Saying) -> None:
    saying.text = SAID
    found = await run("langchain", chat_server)
    assert found["whole"] == found["streamed"]
    tokens = found["whole"].pop("tokens")
    assert tokens > 20
    assert found["whole"] == {"content": "I look.", "calls": CALLS, "finish": "tool_calls"}


async def test_the_blocking_openai_client(chat_server: GatewayServer, saying: Saying) -> None:
    saying.text = "Hello there. 👍🏽"
    url = f"http://127.0.0.1:{chat_server.http_port}/v1"

    def use() -> None:
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
            raw = client.chat.completions.with_raw_response.create(**asked)
            assert raw.headers["x-request-id"] == raw.parse().id.removeprefix("chatcmpl-")
            assert raw.parse().choices[0].message.content == saying.text
            for usage in (True, False):
                stream = client.chat.completions.create(
                    **asked, stream=True, stream_options={"include_usage": usage}
                )
                chunks = list(stream)
                assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == saying.text
                assert (chunks[-1].usage is not None) == usage
            plain = list(client.chat.completions.create(**asked, stream=True))
            assert all(chunk.usage is None and chunk.choices for chunk in plain)
            assert client.responses.create(model="tiny", input="Hi").output_text == saying.text
            assert [model.id for model in client.models.list()] == ["tiny"]
            with pytest.raises(openai.NotFoundError):
                client.chat.completions.create(**asked | {"model": "gpt-4"})

    await asyncio.to_thread(use)


async def test_no_chunk_holds_a_part_of_an_emoji(chat_client: openai.AsyncOpenAI, saying: Saying) -> None:
    saying.text = "<think>日本</think>Well 😀👍🏽👨‍👩‍👧 more"
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
    for _ in range(4):  # each time in other pieces
        text = ""
        async for chunk in await chat_client.chat.completions.create(stream=True, **asked):
            piece = chunk.choices[0].delta.content or ""
            assert "\ufffd" not in piece
            text += piece
        assert text == "Well 😀👍🏽👨‍👩‍👧 more"
