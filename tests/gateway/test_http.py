"""The OpenAI client, and plain requests, against a real HTTP server over scripted and real groups."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import openai
import pytest

from actors.requests import Request
from cluster.gateway import GatewayServer
from kernels_integration.errors import CollectiveError
from tests.support.groups import group_config
from tests.support.inline_client import InlineClient
from tests.support.scripted_group import Script, ScriptedGroup, echo, until, update

pytestmark = pytest.mark.gateway
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
Serve = Callable[..., Awaitable[GatewayServer]]


@pytest.fixture
async def model() -> AsyncIterator[InlineClient]:
    client = InlineClient(group_config(num_speculative_tokens=3, max_model_len=256))
    yield client
    await asyncio.to_thread(client.close)


@pytest.fixture
async def server(serve: Serve, model: InlineClient) -> GatewayServer:
    return await serve(model, http_port=0)


@pytest.fixture
async def client(server: GatewayServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def post(server: GatewayServer, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{server.http_port}{path}", data=data, headers=headers) as answer,
    ):
        text = await answer.text()
        return answer.status, json.loads(text) if text.startswith("{") else text, answer.headers


async def test_a_chat_whole_and_in_pieces(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=FRANCE, temperature=0)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    stream = await client.chat.completions.create(
        model="tiny", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_completion_with_logprobs_and_choices(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": "The SELECT statement",
        "max_tokens": 12,
        "n": 2,
        "seed": 3,
        "logprobs": 2,
    }
    whole = await client.completions.create(**asked)
    chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    for index in (0, 1):
        parts = [c for chunk in chunks for c in chunk.choices if c.index == index]
        expected = whole.choices[index]
        assert "".join(part.text for part in parts) == expected.text
        for field in ("tokens", "token_logprobs", "text_offset"):
            joined = [v for part in parts if part.logprobs for v in getattr(part.logprobs, field)]
            assert joined == getattr(expected.logprobs, field), field
    assert whole.choices[0].text != whole.choices[1].text


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        (["is Paris"], "The capital of France "),
        (["Paris", "ris"], "The capital of France is "),
        (["e is P", "nowhere"], "The capital of Franc"),
        (["."], "The capital of France is Paris"),
        (["Paris. And"], "The capital of France is Paris."),
    ],
)
async def test_stop_strings_across_tokens(client: openai.AsyncOpenAI, stop: list[str], text: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": FRANCE, "temperature": 0, "stop": stop}
    whole = await client.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await client.chat.completions.create(stream=True, **asked)]
    assert whole.choices[0].message.content == text
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"


async def test_the_stream_is_that_of_grpc_and_of_the_seed(client: openai.AsyncOpenAI) -> None:
    texts = set()
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="tiny", messages=FRANCE, seed=11, temperature=1.0, max_completion_tokens=16
        )
        texts.add(answer.choices[0].message.content)
    assert len(texts) == 1


async def test_models_tokens_versions_and_health(server: GatewayServer, client: openai.AsyncOpenAI) -> None:
    listed = await client.models.list()
    assert [model.id for model in listed.data] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "latentray"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")
    status, found, _ = await post(server, "/tokenize", {"prompt": "The SELECT statement"})
    assert (status, found["count"]) == (200, len(found["tokens"]))
    status, text, _ = await post(server, "/detokenize", {"tokens": found["tokens"]})
    assert text["prompt"].endswith("The SELECT statement")
    async with aiohttp.ClientSession() as session:
        for path in ("/health", "/ready", "/version", "/metrics"):
            async with session.get(f"http://127.0.0.1:{server.http_port}{path}") as answer:
                assert answer.status == 200, path


async def test_tokens_with_and_without_special_ones(
    server: GatewayServer, model: InlineClient, client: openai.AsyncOpenAI
) -> None:
    plain = {"prompt": "The SELECT statement", "add_special_tokens": False, "return_token_strs": True}
    _, whole, _ = await post(server, "/tokenize", {"prompt": plain["prompt"]})
    _, bare, _ = await post(server, "/tokenize", plain)
    assert whole["token_strs"] is None
    assert bare["tokens"] == whole["tokens"][1:]
    assert "".join(bare["token_strs"]).replace("Ġ", " ") == plain["prompt"]
    _, chat, _ = await post(server, "/tokenize", {"messages": FRANCE})
    asked = await client.chat.completions.create(model="tiny", messages=FRANCE, max_tokens=1)
    assert asked.usage is not None
    assert chat["count"] == asked.usage.prompt_tokens
    _, more, _ = await post(server, "/tokenize", {"messages": FRANCE, "add_special_tokens": True})
    assert more["tokens"] == [*whole["tokens"][:1], *chat["tokens"]]


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/tokenize", {}, "prompt", "prompt is null; it must be text, or give messages"),
        ("/tokenize", {"prompt": [5]}, "prompt", "must be text"),
        ("/tokenize", {"prompt": ""}, "prompt", "empty"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "true or false"),
        ("/tokenize", {"prompt": "x", "tools": []}, "tools", "unknown; there are add_special_tokens, model"),
        ("/tokenize", {"messages": FRANCE, "temperature": 1}, "temperature", "unknown"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages[0].content", "content is null"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model", "tiny"),
        ("/detokenize", {}, "tokens", "tokens is null; it must be a list"),
        ("/detokenize", {"tokens": []}, "tokens", "at least one token id"),
        ("/detokenize", {"tokens": [5, "6"]}, "tokens", "tokens holds '6'; token ids of tiny are"),
        ("/detokenize", {"tokens": [5, -1]}, "tokens", "tokens holds -1"),
        ("/detokenize", {"tokens": [5], "skip_special_tokens": True}, "skip_special_tokens", "unknown"),
    ],
)
async def test_mistakes_about_tokens_are_named(
    serve: Serve, path: str, body: Any, param: str, words: str
) -> None:
    server = await serve(ScriptedGroup(), http_port=0)
    status, answer, _ = await post(server, path, body)
    assert status == (404 if param == "model" else 400)
    assert (answer["error"]["param"], words in answer["error"]["message"]) == (param, True), answer


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        (b"{", 400, "body", "not JSON"),
        (b"[]", 400, "body", "one JSON object"),
        (b"[" * 100_000, 400, "body", "not JSON"),
        ({}, 400, "messages", "missing"),
        ({"messages": FRANCE, "temprature": 1}, 400, "temprature", "did you mean temperature"),
        ({"messages": FRANCE, "temperature": -1}, 400, "temperature", "-1"),
        ({"messages": FRANCE, "stream": 1}, 400, "stream", "it must be true or false"),
        (
            {"messages": FRANCE, "stream": True, "stream_options": {"x": 1}},
            400,
            "stream_options.x",
            "stream_options.x is unknown; there are include_usage",
        ),
        ({"messages": FRANCE, "stream_options": {"include_usage": True}}, 400, "stream_options", "without"),
        (b'{"messages": [], "messages": []}', 400, "messages", "gives messages twice"),
        (
            b'{"messages": [{"role": "user", "role": "user", "content": "x"}]}',
            400,
            "messages[0].role",
            "gives messages[0].role twice",
        ),
        (b'{"messages": [], "temperature": NaN}', 400, "body", "no number of JSON"),
        ({"messages": FRANCE, "model": "gpt-4"}, 404, "model", "the model served here is 'tiny'"),
        ({"messages": FRANCE, "tools": [{"type": "function"}]}, 400, "tools[0].function", "a name"),
        ({"messages": []}, 400, "messages", "messages"),
    ],
)
async def test_a_mistake_is_told_in_openais_envelope(
    serve: Serve, body: Any, status: int, param: str, words: str
) -> None:
    server = await serve(ScriptedGroup(), http_port=0)
    found, answer, _ = await post(server, "/v1/chat/completions", body)
    assert found == status
    assert answer["error"]["param"] == param
    assert answer["error"]["type"] == "invalid_request_error"
    assert words in answer["error"]["message"]


async def test_paths_methods_headers_and_sizes(serve: Serve) -> None:
    server = await serve(ScriptedGroup(), http_port=0, max_message_bytes=2048)
    status, answer, _ = await post(server, "/v1/nothing", {})
    assert (status, "/v1/chat/completions" in answer["error"]["message"]) == (404, True)
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{server.http_port}/v1/completions") as found,
    ):
        assert (found.status, "POST" in (await found.json())["error"]["message"]) == (405, True)
    status, answer, _ = await post(server, "/v1/completions", {"prompt": "x" * 4096})
    assert (status, "2048" in answer["error"]["message"]) == (413, True)
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        status, answer, _ = await post(server, "/v1/completions", {"prompt": "x"}, **{"Content-Type": kind})
        assert (status, "must be application/json" in answer["error"]["message"]) == (415, True)
    status, answer, _ = await post(server, "/v1/completions", {"prompt": "x"}, **{"X-Request-Timeout": "0"})
    assert (status, answer["error"]["param"]) == (400, "X-Request-Timeout")
    status, answer, _ = await post(server, "/v1/completions", {"prompt": [5], "max_tokens": 256})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert "use at most 255" in answer["error"]["message"]
    asked = {"prompt": [5, 6, 7], "max_tokens": 4}
    status, answer, headers = await post(server, "/v1/completions", asked, **{"X-Request-Id": "mine"})
    assert (status, answer["id"], headers["X-Request-Id"]) == (200, "cmpl-mine", "mine")


async def test_a_client_that_goes_away_ends_its_request(serve: Serve) -> None:
    never = asyncio.Event()

    def script(request: Request) -> Script:
        return [update(request, [5]), never]

    group = ScriptedGroup(script)
    server = await serve(group, http_port=0)
    for stream in (True, False):
        asked = asyncio.create_task(
            post(server, "/v1/completions", {"prompt": [5], "max_tokens": 9, "stream": stream})
        )
        await until(lambda: bool(group.live))
        asked.cancel()
        await until(lambda: not group.live)
    assert set(group.ended.values()) == {"aborted"}


@pytest.mark.parametrize("stream", [True, False])
async def test_blocks_are_free_before_the_next_step_once_a_client_has_gone(
    serve: Serve, stream: bool
) -> None:
    model = InlineClient(group_config(num_speculative_tokens=3, max_model_len=256), num_steps=3)
    server = await serve(model, http_port=0)
    body = {"prompt": "What is", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    asked = asyncio.create_task(post(server, "/v1/completions", body))
    await until(lambda: len(model.history) >= 4, timeout_s=60)  # submitted, and all steps that it may take
    assert model.history[-1][1].num_used_blocks > 0
    asked.cancel()
    await until(lambda: model.history[-1][0].startswith("abort"))
    assert model.history[-1][1].num_used_blocks == 0
    await asyncio.to_thread(model.close)


async def test_deadline_overload_and_loss_have_their_status(serve: Serve) -> None:
    never = asyncio.Event()
    group = ScriptedGroup(lambda request: [never])
    server = await serve(group, http_port=0)
    status, answer, _ = await post(
        server, "/v1/completions", {"prompt": [5], "max_tokens": 9}, **{"X-Request-Timeout": "0.1"}
    )
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    await until(lambda: not group.live)
    group.healthy, group.message = False, "shard 1 is lost"
    status, answer, headers = await post(server, "/v1/completions", {"prompt": [5], "max_tokens": 9})
    assert (status, answer["error"]["message"]) == (503, "shard 1 is lost")
    assert headers["Retry-After"]
    assert headers["X-Request-Id"]


async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(serve: Serve) -> None:
    def script(request: Request) -> Script:
        return [update(request, [5]), CollectiveError("shard 1 is lost")]

    server = await serve(ScriptedGroup(script), http_port=0)
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.http_port}/v1", api_key="none", max_retries=0
    ) as client:
        stream = await client.completions.create(model="tiny", prompt=[5], max_tokens=9, stream=True)
        with pytest.raises(openai.APIError, match="shard 1 is lost"):
            async for _ in stream:
                pass


async def test_many_streams_at_once(serve: Serve) -> None:
    server = await serve(ScriptedGroup(echo), http_port=0)
    body = {"prompt": [5, 6, 7], "max_tokens": 30, "stream": True}
    answers = await asyncio.gather(*(post(server, "/v1/completions", body) for _ in range(100)))
    assert {status for status, _, _ in answers} == {200}
    assert all(text.endswith("data: [DONE]\n\n") for _, text, _ in answers)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_have_the_answers_of_each(client: openai.AsyncOpenAI, stream: bool) -> None:
    prompts = ["The SELECT statement", [5, 6, 7], "What is"]
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "n": 2, "seed": 3, "temperature": 1.0}
    expected = []
    for prompt in prompts:
        alone = await client.completions.create(prompt=prompt, **asked)
        expected += [choice.text for choice in alone.choices]
    together: dict[str, Any] = asked | {"prompt": prompts}
    if not stream:
        answer = await client.completions.create(**together)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 36
        return
    found = [""] * 6
    async for chunk in await client.completions.create(
        stream=True, stream_options={"include_usage": True}, **together
    ):
        for choice in chunk.choices:
            found[choice.index] += choice.text
        if not chunk.choices:
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens == 36
    assert found == expected


@pytest.mark.parametrize("max_tokens", [0, 5])
async def test_an_echo_holds_the_prompt_and_its_log_probabilities(
    client: openai.AsyncOpenAI, max_tokens: int
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["The SELECT statement", [5, 6, 7]], "n": 2}
    asked |= {"max_tokens": max_tokens, "seed": 3, "logprobs": 1, "echo": True}
    whole = await client.completions.create(**asked)
    plain = await client.completions.create(
        **asked | {"echo": False, "max_tokens": 5}, extra_body={"prompt_logprobs": 1}
    )
    chunks = [chunk async for chunk in await client.completions.create(**asked, stream=True)]
    for choice, alone in zip(whole.choices, plain.choices, strict=True):
        assert choice.logprobs is not None
        assert alone.logprobs is not None
        completion = alone.text if max_tokens else ""
        assert choice.text.endswith(completion)
        if choice.index < 2:
            assert choice.text == "The SELECT statement" + completion
        values = choice.logprobs.token_logprobs or []
        assert values[0] is None
        first = plain.choices[choice.index // 2 * 2]
        scored = [next(iter(entry.values())) for entry in first.model_extra["prompt_logprobs"][1:]]
        assert values[1 : 1 + len(scored)] == [entry["logprob"] for entry in scored]
        assert values[1 + len(scored) :] == (alone.logprobs.token_logprobs if max_tokens else [])
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [v for part in parts if part.logprobs for v in getattr(part.logprobs, field)]
            assert joined == getattr(choice.logprobs, field), field
        assert choice.finish_reason == alone.finish_reason
