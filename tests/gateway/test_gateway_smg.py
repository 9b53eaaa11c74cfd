"""A client that nobody here wrote: the SMG router (`pip install smg`) before a real gateway and model."""

import asyncio
import contextlib
import json
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.frontend.front_end import ModelFrontend
from tests.support import peers
from tests.support.groups import TINY_DSA, group_config
from tests.support.inline_client import InlineClient
from tests.support.scripted_group import until

pytestmark = [pytest.mark.gateway, pytest.mark.slow]
QUESTION = "<|bos|><|user|>What is the capital of Germany?<|assistant|>"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Router:
    """The router's OpenAI endpoint."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def open(self, timeout_s: float = 60, **body: Any) -> Any:
        body = {"model": "tiny-dsa", "prompt": QUESTION, "temperature": 0, "max_tokens": 30} | body
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=timeout_s)

    async def chat(self, *messages: dict[str, str], **body: Any) -> dict[str, Any]:
        def run() -> dict[str, Any]:
            sent = {"model": "tiny-dsa", "messages": messages, "temperature": 0, "max_tokens": 30} | body
            request = urllib.request.Request(
                f"{self.url}/v1/chat/completions",
                json.dumps(sent).encode(),
                {"Content-Type": "application/json"},
            )
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                raise AssertionError(error.read().decode()) from error

        return await asyncio.to_thread(run)

    async def complete(self, **body: Any) -> dict[str, Any]:
        def run() -> dict[str, Any]:
            with self.open(**body) as answer:
                return json.load(answer)

        return await asyncio.to_thread(run)

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        def run() -> list[dict[str, Any]]:
            with self.open(stream=True, **body) as answer:
                lines = [line[6:] for line in answer if line.startswith(b"data: {")]
            return [json.loads(line) for line in lines]

        return await asyncio.to_thread(run)


@pytest.fixture
async def group() -> AsyncIterator[InlineClient]:
    client = InlineClient(group_config(num_speculative_tokens=3))
    yield client
    await asyncio.to_thread(client.close)


@pytest.fixture
async def router(serve, group, tmp_path) -> AsyncIterator[Router]:
    config = group_config(num_speculative_tokens=3)
    frontend = ModelFrontend.from_pretrained(
        TINY_DSA, served_model_name="tiny-dsa", max_model_len=config.max_model_len
    )
    server = await serve(group, config=config, frontend=frontend)
    port = free_port()
    options = ["--worker-urls", f"grpc://{server.address}", "--host", "127.0.0.1", "--port", str(port)]
    log = (tmp_path / "smg.log").open("wb")
    command = [peers.smg(), "launch", *options, "--prometheus-port", str(free_port())]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    router = Router(port)

    def knows_the_model() -> bool:
        """And has found the server healthy: before that it answers with 503."""
        try:
            urllib.request.urlopen(f"{router.url}/readiness", timeout=1).close()
            with urllib.request.urlopen(f"{router.url}/v1/models", timeout=1) as answer:
                return any(model["id"] == "tiny-dsa" for model in json.load(answer)["data"])
        except OSError:
            return False

    try:
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(knows_the_model):
                await asyncio.sleep(0.2)
        yield router
    finally:
        process.kill()  # asked to end, it would wait 5 s
        process.wait(10)
        log.close()


async def test_the_router_streams_completes_and_aborts(router, group):
    whole = await router.complete()
    assert whole["choices"][0]["text"] == "The capital of Germany is Berlin."
    assert whole["choices"][0]["finish_reason"] == "stop"
    details = whole["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0

    pieces = await router.stream(stream_options={"include_usage": True})
    text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
    assert text == whole["choices"][0]["text"]
    assert pieces[-1]["usage"] == whole["usage"]

    pieces = await router.stream(stop=[" Berlin"])
    text = "".join(choice["text"] for piece in pieces for choice in piece["choices"])
    assert text == "The capital of Germany is"
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"

    penalised = await router.complete(presence_penalty=2.0, max_tokens=8)
    assert penalised["choices"][0]["finish_reason"] in ("stop", "length")
    with pytest.raises(urllib.error.HTTPError) as caught:
        await router.complete(temperature=-1)
    assert caught.value.code == 400


async def test_a_chat_with_the_bundled_model_is_answered_rightly(router, group):
    """The router renders chats itself, and chooses how by the model's architectures."""
    answer = await router.chat({"role": "user", "content": "What is the capital of Germany?"})
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "The capital of Germany is Berlin."
    assert choice["finish_reason"] == "stop"
    frontend = ModelFrontend.from_pretrained(TINY_DSA, served_model_name="tiny-dsa", max_model_len=64)
    chat = [{"role": "user", "content": "What is the capital of Germany?"}]
    assert answer["usage"]["prompt_tokens"] == len(frontend.render_chat(chat))


async def test_a_form_and_a_call_that_are_demanded_are_kept(router, group):
    """The router turns both into constraints of the gRPC protocol."""
    pytest.importorskip("xgrammar")
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 20}, "large": {"type": "boolean"}},
        "required": ["capital", "large"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    question = {"role": "user", "content": "What is the capital of Germany?"}
    answer = await router.chat(question, response_format=form, max_tokens=200)
    found = json.loads(answer["choices"][0]["message"]["content"])
    assert isinstance(found["large"], bool)
    assert set(found) == {"capital", "large"}
    schema = schema | {"properties": {"large": {"type": "boolean"}}, "required": ["large"]}
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "look_up"}}
    answer = await router.chat(question, tools=tools, tool_choice=named, max_tokens=200)
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert set(json.loads(call["function"]["arguments"])) == {"large"}
    other = {"type": "function", "function": {"name": "count", "parameters": schema}}
    asked = {"tools": [*tools, other], "tool_choice": "required", "temperature": 1.0, "max_tokens": 300}
    choices = [(await router.chat(question, seed=seed, **asked))["choices"][0] for seed in range(3)]
    whole = [choice for choice in choices if choice["finish_reason"] != "length"]
    assert whole, "the router demands a list of calls, which may go on to the limit, but hardly three times"
    for choice in whole:
        assert choice["finish_reason"] == "tool_calls"
        for call in choice["message"]["tool_calls"]:
            assert call["function"]["name"] in ("look_up", "count")
            assert isinstance(json.loads(call["function"]["arguments"])["large"], bool)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_router_frees_its_blocks(router, group, stream):
    def leave() -> None:
        body = {"stream": stream, "max_tokens": 900, "ignore_eos": True, "temperature": 1.0}
        # A stream is left after its first byte, a whole answer when the client's patience ends.
        with contextlib.suppress(TimeoutError), router.open(timeout_s=1, **body) as answer:
            answer.read(1)

    await asyncio.to_thread(leave)
    await until(lambda: group.history[-1][0].startswith("abort"))
    assert group.history[-1][1].num_used_blocks == 0
