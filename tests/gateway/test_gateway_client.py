"""Both clients against a real server."""

import asyncio
import contextlib
import threading

import pytest

from cluster.client import AsyncClient, Client, SamplingParams
from kernels_integration.errors import (
    AbortedError,
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from tests.support.scripted_group import ScriptedGroup, until, update

pytestmark = [pytest.mark.gateway, pytest.mark.alone]


async def test_stream_and_whole_say_the_same(serve, frontend):
    server = await serve(ScriptedGroup())
    prompt = "The café — 漢字 🙂. "
    ids = frontend.encode_prompt(prompt)
    async with AsyncClient(server.address) as client:
        params = SamplingParams(max_tokens=3 * len(ids), seed=5)
        pieces = [piece async for piece in client.generate(prompt, params)]
        whole = await client.generate(prompt, params, stream=False)
        by_ids = await client.generate(ids, params, stream=False)
    assert whole.token_ids == by_ids.token_ids == ids * 3
    assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
    assert "".join(p.text for p in pieces) == whole.text == frontend.tokenizer.decode(ids * 3)
    assert pieces[-1].finish_reason == whole.finish_reason == "length"
    assert pieces[-1].usage == whole.usage
    assert whole.usage.draft_tokens > 0
    assert pieces[-1].seed == whole.seed == 5


async def test_the_blocking_client_says_what_the_asyncio_client_says(serve, frontend):
    group = ScriptedGroup()
    server = await serve(group)

    def use() -> None:
        with Client(server.address) as client:
            pieces = list(client.generate([10, 11], max_tokens=7, logprobs=1, temperature=0))
            whole = client.generate([10, 11], stream=False, max_tokens=7, logprobs=1)
            assert tuple(t for p in pieces for t in p.token_ids) == whole.token_ids
            assert tuple(e for p in pieces for e in p.logprobs) == whole.logprobs
            assert "".join(p.text for p in pieces) == whole.text == frontend.tokenizer.decode(whole.token_ids)
            assert whole.seed == group.requests[-1].seed
            assert client.health().healthy
            assert client.model_info().default_sampling_params == {"temperature": 0.7, "top_p": 0.9}
            assert client.model_info().eos_token_ids == (1,)
            assert client.server_info().max_num_seqs == 8
            assert client.server_info().kv_bytes_per_token == 7 * (128 + 32 + 64) * 4
            assert client.loads()[0].max_tokens == 64 * 16
            assert client.tokenizer().encode("hello") == frontend.tokenizer.encode("hello")

    await asyncio.to_thread(use)
    async with AsyncClient(server.address) as client:
        assert (await client.health()).healthy
        assert (await client.model_info()).max_model_len == 256
        assert not (await client.server_info()).draining
        assert (await client.server_info()).kv_bytes_per_token == 7 * (128 + 32 + 64) * 4
        assert (await client.loads())[0].running == 0


async def test_leaving_a_stream_early_ends_the_request(serve):
    group = ScriptedGroup(lambda r: [update(r, [10]), asyncio.Event()])
    server = await serve(group)
    async with AsyncClient(server.address, decode=False) as client:
        async with contextlib.aclosing(client.generate([1])) as pieces:
            await anext(pieces)
            assert len(group.live) == 1
        await until(lambda: not group.live, 1)

    def leave() -> None:
        with Client(server.address, decode=False) as client:
            for _ in client.generate([1]):
                break

    await asyncio.to_thread(leave)
    await until(lambda: not group.live, 1)


async def test_abort_from_another_client(serve):
    group = ScriptedGroup(lambda r: [update(r, [10]), asyncio.Event()])
    server = await serve(group)
    async with AsyncClient(server.address, decode=False) as one, AsyncClient(server.address) as two:
        pieces = one.generate([1], request_id="mine")
        await anext(pieces)
        await two.abort(["mine"])
        with pytest.raises(AbortedError, match="Abort"):
            await anext(pieces)


@pytest.mark.parametrize("stream", [True, False])
async def test_errors_come_back_by_kind(serve, stream):
    causes = {"full": OverloadedError("full"), "lost": UnavailableError("lost")}
    group = ScriptedGroup(
        lambda r: [causes[r.request_id]] if r.request_id in causes else [update(r, [1]), asyncio.Event()]
    )
    server = await serve(group)

    async def ask(client: AsyncClient, prompt, **options) -> None:
        if stream:
            async for _ in client.generate(prompt, **options):
                pass
        else:
            await client.generate(prompt, stream=False, **options)

    async with AsyncClient(server.address, decode=False) as client:
        for request_id, cause in causes.items():
            with pytest.raises(type(cause), match=str(cause)):
                await ask(client, [1], request_id=request_id)
        with pytest.raises(InvalidRequestError, match="6144") as caught:
            await ask(client, [6144])
        assert caught.value.field == "prompt"
        with pytest.raises(DeadlineExceededError):
            await ask(client, [1], timeout_s=0.2)
        live = client.generate([1], request_id="twice")
        await anext(live)
        with pytest.raises(DuplicateRequestError, match="twice"):
            await ask(client, [1], request_id="twice")


@pytest.mark.parametrize("num_tokens", [2100, 50_000])  # refused by the server; by gRPC before it
async def test_too_large_a_message_names_the_flag(serve, num_tokens):
    server = await serve(ScriptedGroup(), max_message_bytes=2000)
    async with AsyncClient(server.address, decode=False) as client:
        with pytest.raises(InvalidRequestError, match="--max-message-size"):
            await client.generate([5] * num_tokens, stream=False)


async def test_no_server_is_unavailable_and_names_the_target(serve):
    server = await serve(ScriptedGroup())
    await server.stop(drain_s=0)
    async with AsyncClient(server.address) as client:
        with pytest.raises(UnavailableError, match=server.address):
            await client.health()

    def ask() -> None:
        with Client(server.address) as client, pytest.raises(UnavailableError, match=server.address):
            list(client.generate("x"))

    await asyncio.to_thread(ask)


async def test_one_blocking_client_serves_many_threads(serve):
    server = await serve(ScriptedGroup())
    failures: list[BaseException] = []

    def ask(client: Client, token: int) -> None:
        try:
            whole = client.generate([token], stream=False, max_tokens=20)
            assert whole.token_ids == (token,) * 20
        except BaseException as error:
            failures.append(error)

    def use() -> None:
        with Client(server.address) as client:
            threads = [threading.Thread(target=ask, args=(client, 100 + i)) for i in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    await asyncio.to_thread(use)
    assert not failures
