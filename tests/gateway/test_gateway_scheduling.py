"""Priorities and cache salts, which travel as metadata of the call, before the real coordinator and model."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from cluster.client import AsyncClient, Client, SamplingParams
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import InvalidRequestError
from tests.support.groups import TINY_DSA, group_config, text_prompts
from tests.support.inline_client import InlineClient
from tests.support.scripted_group import until

pytestmark = [pytest.mark.gateway, pytest.mark.alone]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = text_prompts([48])[0]


@pytest.fixture(scope="module")
def config():
    return group_config(scheduling_policy="priority", max_model_len=600, max_num_seqs=1)


@pytest.fixture(scope="module")
def frontend(config):
    return ModelFrontend.of_group(config)


@pytest.fixture
async def group(config) -> AsyncIterator[InlineClient]:
    client = InlineClient(config)
    yield client
    await asyncio.to_thread(client.close)


async def test_prefixes_are_shared_under_one_salt_only(serve, group):
    server = await serve(group)
    async with AsyncClient(server.address) as client:
        cached = []
        for salt in (None, None, "größe", "größe", "other", None):
            completion = await client.generate(PROMPT, PARAMS, stream=False, cache_salt=salt)
            cached.append(completion.usage.cached_tokens)
    assert cached == [0, 47, 0, 47, 0, 47]

    def blocking() -> int:
        with Client(server.address) as client:
            return client.generate(PROMPT, PARAMS, stream=False, cache_salt="other").usage.cached_tokens

    assert await asyncio.to_thread(blocking) == 47


async def test_lower_priorities_are_served_first(serve, config, frontend):
    group = InlineClient(config, num_steps=0)
    server = await serve(group)
    finished: list[int] = []
    async with AsyncClient(server.address) as client:

        async def ask(priority: int) -> None:
            await client.generate(PROMPT, PARAMS, stream=False, priority=priority)
            finished.append(priority)

        await client.tokenizer()
        tasks = [asyncio.create_task(ask(priority)) for priority in (3, -1, 2, 0)]
        await until(lambda: group.stats is not None and group.stats.waiting == 4)
        group.allow(1000)
        await asyncio.gather(*tasks)
    await asyncio.to_thread(group.close)
    assert finished == [-1, 0, 2, 3]


async def test_what_would_do_nothing_is_refused(serve, group, stub_of, config):
    under_fcfs = ModelFrontend.from_pretrained(TINY_DSA, served_model_name="tiny", max_model_len=600)
    server = await serve(group, frontend=under_fcfs)
    async with AsyncClient(server.address) as client:
        with pytest.raises(InvalidRequestError, match="--scheduling-policy priority") as caught:
            await client.generate(PROMPT, PARAMS, stream=False, priority=1)
        assert caught.value.field == "priority"
        with pytest.raises(InvalidRequestError, match="cache_salt") as caught:
            await client.generate(PROMPT, PARAMS, stream=False, cache_salt="")
        assert caught.value.field == "cache_salt"
    for metadata, named in [
        (("latentray-priority", "high"), "whole number"),
        (("latentray-cache-salt-bin", b"\xff"), "UTF-8"),
    ]:
        call = stub_of(server).Generate(pb.GenerateRequest(text="Hi"), metadata=[metadata])
        with pytest.raises(Exception, match=named):
            await call.read()
