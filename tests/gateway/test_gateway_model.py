"""The gateway before the real coordinator and the bundled checkpoint."""

import asyncio
import math
from collections.abc import AsyncIterator

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.inline_group import InlineGroup
from actors.requests import Request
from cluster.client import AsyncClient, SamplingParams
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import AbortedError, DeadlineExceededError
from tests.support.groups import TINY_DSA, group_config, load_tokenizer, run, text_prompts
from tests.support.inline_client import InlineClient
from tests.support.scripted_group import until

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
QUESTION = "<|bos|><|user|>What is the capital of France?<|assistant|>"


@pytest.fixture(scope="module")
def config():
    return group_config(
        num_speculative_tokens=3, max_model_len=600, max_num_batched_tokens=64, max_num_seqs=4
    )


@pytest.fixture(scope="module")
def frontend(config):
    return ModelFrontend.from_pretrained(
        TINY_DSA, served_model_name="tiny", max_model_len=config.max_model_len, seed=1
    )


@pytest.fixture
async def group(config) -> AsyncIterator[InlineClient]:
    client = InlineClient(config)
    yield client
    await asyncio.to_thread(client.close)


@pytest.fixture
async def client(serve, group) -> AsyncIterator[AsyncClient]:
    server = await serve(group)
    async with AsyncClient(server.address) as client:
        yield client


def expected(config, frontend, prompt, params: SamplingParams, seed: int):
    """The same request straight through a group that does not draft."""
    plain = InlineGroup(group_config(max_model_len=config.max_model_len), tokenizer=load_tokenizer())
    request = Request(
        request_id="r",
        prompt_token_ids=frontend.encode_prompt(prompt),
        params=params,
        seed=seed,
        eos_token_ids=frontend.eos_token_ids,
    )
    return run(plain, [request])["r"]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, seed=-7, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=60, stop=("Paris",)),
        SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True, logprobs=3),
    ],
    ids=["greedy", "seeded", "stop", "logprobs"],
)
async def test_over_grpc_the_stream_is_that_of_the_group(client, config, frontend, params):
    ids = tuple(frontend.tokenizer.encode(QUESTION, add_special_tokens=False))
    reference = expected(config, frontend, ids, params, (params.seed or 0) % 2**64)
    pieces = [piece async for piece in client.generate(ids, params)]
    whole = await client.generate(ids, params, stream=False)
    assert list(whole.token_ids) == reference.token_ids
    assert [t for p in pieces for t in p.token_ids] == reference.token_ids
    assert "".join(p.text for p in pieces) == whole.text
    assert whole.finish_reason == pieces[-1].finish_reason == reference.last.finish_reason
    assert whole.matched_stop == pieces[-1].matched_stop == reference.last.matched_stop
    assert whole.usage.prompt_tokens == len(ids)
    assert whole.usage.completion_tokens == len(reference.token_ids)
    assert whole.usage.draft_tokens > 0
    if params.stop:
        assert whole.matched_stop == "Paris"
        assert "Paris" not in whole.text
    elif params.temperature == 0:
        assert "Paris" in whole.text
    if params.logprobs:
        wanted = [entry for update in reference.updates for entry in update.logprobs]
        for found in (whole.logprobs, tuple(e for p in pieces for e in p.logprobs)):
            assert [e.token_id for e in found] == [e.token_id for e in wanted]
            assert [e.logprob for e in found] == pytest.approx([e.logprob for e in wanted], abs=1e-4)
            assert [[t for t, _ in e.top] for e in found] == [[t for t, _ in e.top] for e in wanted]


async def test_more_streams_than_slots(client, config, frontend):
    prompts = text_prompts([5, 70, 9, 30] * 2)
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=8, ignore_eos=True)
    answers = await asyncio.gather(*(client.generate(p, params, stream=False) for p in prompts))
    again = [await client.generate(p, params, stream=False) for p in prompts]
    assert [a.token_ids for a in answers] == [a.token_ids for a in again]
    assert len({a.token_ids for a in answers}) > 4


@pytest.mark.parametrize(("phase", "num_steps"), [("queued", 0), ("prefill", 3), ("decode", 10)])
@pytest.mark.parametrize("way", ["abort", "cancel", "deadline"])
async def test_blocks_are_free_at_once_however_and_whenever_a_request_ends(
    serve, config, phase, num_steps, way
):
    [prompt] = text_prompts([300])  # 5 chunks of at most 64 rows
    group = InlineClient(config, num_steps)
    await until(lambda: group.stats is not None, 30)  # a deadline must not run while the model loads
    server = await serve(group)
    async with AsyncClient(server.address, decode=False) as client:
        generated = 0

        async def read() -> None:
            nonlocal generated
            timeout_s = 2.5 if way == "deadline" else None
            params = SamplingParams(max_tokens=200, ignore_eos=True)
            async for piece in client.generate(prompt, params, request_id="long", timeout_s=timeout_s):
                generated += len(piece.token_ids)

        reading = asyncio.create_task(read())
        await until(lambda: len(group.history) == num_steps + 1)  # the submission, then steps
        assert (group.stats.num_used_blocks > 0) == (phase != "queued")
        if way == "abort":
            await client.abort(["long"])
        elif way == "cancel":
            reading.cancel()
        errors = {"abort": AbortedError, "cancel": asyncio.CancelledError, "deadline": DeadlineExceededError}
        with pytest.raises(errors[way]):
            await reading
        await until(lambda: group.history[-1][0] == "abort long")
        event, stats = group.history[num_steps + 1]  # no step lies between
        assert event == "abort long"
        assert (stats.num_used_blocks, stats.running, stats.waiting, stats.num_aborted) == (0, 0, 0, 1)
        assert (stats.num_generated_tokens > 0) == (phase == "decode")
        assert generated <= stats.num_generated_tokens  # the last chunk may be lost with its stream
    await asyncio.to_thread(group.close)


async def test_a_request_behind_full_slots_can_be_aborted_and_the_others_go_on(serve, config):
    [prompt] = text_prompts([20])
    group = InlineClient(config, num_steps=3)
    server = await serve(group)
    async with AsyncClient(server.address, decode=False) as client:

        def ask(name: str) -> asyncio.Task:
            answer = client.generate(prompt, request_id=name, stream=False, ignore_eos=True, max_tokens=20)
            return asyncio.create_task(answer)

        running = [ask(f"r{i}") for i in range(config.max_num_seqs)]
        await until(lambda: len(group.history) == config.max_num_seqs + 3)
        last = ask("last")
        await until(lambda: group.history[-1][0] == "submit last")
        assert (group.stats.running, group.stats.waiting) == (4, 1)
        await client.abort(["last"])
        with pytest.raises(AbortedError):
            await last
        await until(lambda: group.history[-1][0] == "abort last")
        assert (group.stats.running, group.stats.waiting) == (4, 0)
        group.allow(math.inf)
        answers = await asyncio.gather(*running)
    assert [a.usage.completion_tokens for a in answers] == [20] * 4
    await asyncio.to_thread(group.close)


async def test_max_tokens_unset_runs_to_the_end_of_the_context(serve, stub_of, group, config):
    stub = stub_of(await serve(group))
    [prompt] = text_prompts([590])
    request = pb.GenerateRequest(request_id="r", tokenized=pb.TokenizedInput(input_ids=prompt))
    request.sampling_params.ignore_eos = True
    [response] = [response async for response in stub.Generate(request)]
    assert response.complete.finish_reason == "length"
    assert response.complete.completion_tokens == config.max_model_len - len(prompt)


async def test_a_client_that_vanishes_is_no_burden(serve, stub_of, group):
    server = await serve(group)
    [prompt] = text_prompts([300])
    channel = grpc.aio.insecure_channel(server.address)
    stub = type(stub_of(server))(channel)
    request = pb.GenerateRequest(
        request_id="gone", tokenized=pb.TokenizedInput(input_ids=prompt), stream=True
    )
    request.sampling_params.ignore_eos = True
    call = aiter(stub.Generate(request))
    await anext(call)
    await channel.close()
    await until(lambda: group.history[-1][0] == "abort gone")
    assert group.history[-1][1].num_used_blocks == 0
