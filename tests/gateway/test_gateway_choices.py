"""n choices and prompt log probabilities over gRPC, before the real coordinator and model."""

import asyncio
import json
from collections.abc import AsyncIterator

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from cluster.client import AsyncClient, SamplingParams
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import AbortedError
from kernels_integration.philox import choice_seed
from tests.support.groups import TINY_DSA, group_config
from tests.support.inline_client import InlineClient
from tests.support.scripted_group import until

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
PROMPT = "The function returns"
PARAMS = SamplingParams(
    n=3, temperature=1.0, seed=11, max_tokens=8, presence_penalty=0.5, logprobs=1, prompt_logprobs=2
)


@pytest.fixture(scope="module")
def config():
    return group_config(num_speculative_tokens=3, max_model_len=600, max_num_seqs=4)


@pytest.fixture(scope="module")
def frontend(config):
    return ModelFrontend.from_pretrained(TINY_DSA, served_model_name="tiny", max_model_len=600, seed=1)


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


async def test_choices_stream_side_by_side_and_come_whole(client, frontend):
    whole = await client.generate(PROMPT, PARAMS, stream=False)
    completions = [whole, *whole.others]
    assert [c.seed for c in completions] == [choice_seed(11, i) for i in range(3)]
    assert len({c.token_ids for c in completions}) == 3
    assert [len(c.prompt_logprobs) for c in completions] == [len(frontend.encode_prompt(PROMPT)) - 1, 0, 0]
    texts, tokens, prompt_logprobs, ends = [""] * 3, [[], [], []], [], []
    async for piece in client.generate(PROMPT, PARAMS):
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        prompt_logprobs += piece.prompt_logprobs
        if piece.finish_reason is not None:
            ends.append(piece.index)
            assert piece.seed == completions[piece.index].seed
    assert sorted(ends) == [0, 1, 2]
    assert texts == [c.text for c in completions]
    assert tokens == [list(c.token_ids) for c in completions]
    assert [(e.token_id, [t for t, _ in e.top]) for e in prompt_logprobs] == [
        (e.token_id, [t for t, _ in e.top]) for e in whole.prompt_logprobs
    ]
    alone = await client.generate(PROMPT, PARAMS, stream=False, n=1)
    assert alone.token_ids == whole.token_ids


async def test_the_first_prompt_token_has_no_value_and_effective_values_are_told(serve, group, frontend):
    server = await serve(group)
    async with grpc.aio.insecure_channel(server.address) as channel:
        call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(
            pb.GenerateRequest(
                text=PROMPT, sampling_params=pb.SamplingParams(max_tokens=2, prompt_logprobs=1, top_p=0.5)
            )
        )
        [response] = [response async for response in call]
        told = dict(await call.initial_metadata())
    found = response.complete.input_logprobs
    assert list(found.token_ids) == list(frontend.encode_prompt(PROMPT))
    assert not found.token_logprobs[0].HasField("value")
    assert all(entry.HasField("value") and entry.value < 0 for entry in found.token_logprobs[1:])
    assert [len(top.token_ids) for top in found.top_logprobs] == [0] + [1] * (len(found.token_ids) - 1)
    effective = json.loads(told["latentray-sampling-params"])
    assert effective["seed"] == int(told["latentray-seed"])
    assert (effective["temperature"], effective["top_p"], effective["n"]) == (1.0, 0.5, 1)


async def test_abort_ends_all_choices(client, group):
    long = SamplingParams(n=3, temperature=1.0, ignore_eos=True, max_tokens=500)
    pieces = client.generate(PROMPT, long, request_id="many")
    await anext(pieces)
    await client.abort(["many"])
    with pytest.raises(AbortedError):
        async for _ in pieces:
            pass
    await until(lambda: group.stats is not None and group.stats.num_used_blocks == 0)
