"""Processes that are killed while they serve: every stream goes on, token by token as if nothing had been."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import cycle, islice
from pathlib import Path
from random import Random

import pytest
import ray
from msgspec.structs import replace

from actors.requests import Request, RequestUpdate
from actors.structured_outputs import StructuredOutputs
from cluster.answering.answering import Answering
from cluster.answering.group_client import ClientFollower, GroupClient
from cluster.launch.group import GroupHandle, launch_group
from cluster.launch.ray_session import RaySession
from tests.support.ray_groups import (
    eventually,
    group_config,
    inline_tokens,
    is_alive,
    requests,
    served_tokens,
)

pytestmark = pytest.mark.ray

NUM_TOKENS = 60


@pytest.fixture(scope="module")
def asked() -> list[Request]:
    """Ten streams, two of them with grammars, prompts of 8 to 300 tokens: several steps of prefill, then
    verifies with 3 drafts."""
    long = [tuple(islice(cycle(r.prompt_token_ids), 300)) for r in requests()[:2]]
    more = [
        replace(r, request_id=f"long-{i}", prompt_token_ids=prompt)
        for i, (r, prompt) in enumerate(zip(requests(), long, strict=False))
    ]
    free = [
        replace(r, params=replace(r.params, max_tokens=NUM_TOKENS, ignore_eos=True))
        for r in [*requests(), *more]
    ]
    return [*free, *(_held(r) for r in free[:2] if importlib.util.find_spec("xgrammar"))]


def _held(request: Request) -> Request:
    """The same with a grammar, whose place new shards find from the tokens."""
    form = StructuredOutputs.of(regex="([a-z]{2,9}, )+[A-Z]")
    params = replace(request.params, structured_outputs=form, temperature=1.0)
    return replace(request, request_id=f"held-{request.request_id}", params=params)


@pytest.fixture(scope="module")
def undisturbed(asked: list[Request]) -> dict[str, list[int]]:
    return inline_tokens(asked)


@pytest.fixture(scope="module")
def group() -> Iterator[GroupHandle]:
    """One for all kills of this file."""
    with launch_group(dataclasses.replace(group_config(2, 1), max_restarts=1000), address="local") as handle:
        yield handle


@asynccontextmanager
async def connected(group: GroupHandle) -> AsyncIterator[GroupClient]:
    async with GroupClient(group.request_address, keys=group.request_keys) as client:
        await eventually(lambda: client.healthy, 20)
        yield client


def pids_of(group: GroupHandle) -> dict[str, int]:
    """Also of those that are stopped, and would not answer."""
    return {name: node.pid for name, node in group.placement.items()}


def session_name() -> str:
    assert RaySession._shared is not None
    assert RaySession._shared.local is not None
    return RaySession._shared.local.name


PHASES = {"prefill": 0, "first tokens": 8, "verify": 200}
"""Tokens generated before the kill, all streams together."""


@pytest.mark.product(1)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 1])
async def test_streams_survive_a_killed_shard(
    group: GroupHandle,
    asked: list[Request],
    undisturbed: dict[str, list[int]],
    rank: int,
    phase: str,
) -> None:
    async with connected(group) as client:
        before = await client.current_stats()
        pids = pids_of(group)
        live = asyncio.create_task(served_tokens(client, asked))
        await asyncio.sleep(0.01)
        while (await client.current_stats()).num_generated_tokens - before.num_generated_tokens < PHASES[
            phase
        ]:
            await asyncio.sleep(0.01)
        assert not live.done()
        os.kill(pids[f"shard {rank}"], signal.SIGKILL)
        await eventually(lambda: not client.healthy, 10)  # how soon is test_group_lifecycle's
        assert await live == undisturbed
        after = await client.current_stats()
    assert (after.epoch, after.num_restarts) == (before.epoch + 1, before.num_restarts + 1)
    assert (after.running, after.waiting, after.num_used_blocks) == (0, 0, 0)
    now = pids_of(group)
    assert {name for name in now if now[name] != pids[name]} == {f"shard {rank}"}, "who lives stays"
    assert not is_alive(pids[f"shard {rank}"])
    assert group.failure is None
    assert not list(Path("/dev/shm").glob(f"latentray-{session_name()}-*"))


async def answered(answering: Answering, asked: list[Request]) -> dict[str, list[RequestUpdate]]:
    async def updates_of(request: Request) -> list[RequestUpdate]:
        return [update async for update in answering.run(request)]

    updates = await asyncio.gather(*map(updates_of, asked))
    return {request.request_id: found for request, found in zip(asked, updates, strict=True)}


def tokens_in(answers: dict[str, list[RequestUpdate]]) -> dict[str, list[int]]:
    return {name: [t for update in found for t in update.token_ids] for name, found in answers.items()}


@asynccontextmanager
async def following(group: GroupHandle) -> AsyncIterator[tuple[GroupClient, Answering]]:
    """A front end as the gateway is one."""
    client = GroupClient(group.request_address, keys=group.request_keys, recovery_s=60)
    group.follow(ClientFollower(client, asyncio.get_running_loop().call_soon_threadsafe))
    async with client:
        await eventually(lambda: client.healthy, 20)
        yield client, Answering([client])
    group._group.followers.clear()


@pytest.mark.product(1)
@pytest.mark.parametrize("phase", PHASES)
async def test_streams_survive_a_killed_coordinator(
    group: GroupHandle, asked: list[Request], undisturbed: dict[str, list[int]], phase: str
) -> None:
    asked = [replace(r, params=replace(r.params, logprobs=1, prompt_logprobs=0)) for r in asked]
    async with following(group) as (client, answering):
        before, pids = await client.current_stats(), pids_of(group)
        live = asyncio.create_task(answered(answering, asked))
        await asyncio.sleep(0.01)
        while client.stats.num_generated_tokens - before.num_generated_tokens < PHASES[phase]:
            await asyncio.sleep(0.01)
        assert not live.done()
        os.kill(pids["coordinator"], signal.SIGKILL)
        await eventually(lambda: not client.healthy, 10)  # how soon is test_group_lifecycle's
        answers = await live
        after = await client.current_stats()
    assert tokens_in(answers) == undisturbed
    for request in asked:
        updates = answers[request.request_id]
        assert [p.token_id for u in updates for p in u.logprobs] == undisturbed[request.request_id]
        assert [p.token_id for u in updates for p in u.prompt_logprobs] == list(request.prompt_token_ids[1:])
        assert [u.num_completion_tokens for u in updates][-1] == NUM_TOKENS
    assert after.epoch == before.epoch + 1
    assert (after.running, after.waiting, after.num_used_blocks) == (0, 0, 0)
    now = pids_of(group)
    assert {name for name in now if now[name] != pids[name]} == {"coordinator"}, "weights are not read again"
    assert group.failure is None


@pytest.mark.slow
@pytest.mark.product(1)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(4))
async def test_streams_survive_random_faults(
    group: GroupHandle, asked: list[Request], seed: int, request: pytest.FixtureRequest
) -> None:
    """Seeded: when, and who is stopped meanwhile. A stopped process comes back and is no loss.

    All cases: minutes of it, a fault every few seconds.
    """
    random = Random(seed)
    asked = [replace(r, params=replace(r.params, max_tokens=150)) for r in asked]
    expected = inline_tokens(asked)
    for _ in range(6 if request.config.getoption("--all-cases") else 1):
        await survive_four_faults(group, asked, expected, random)


async def survive_four_faults(
    group: GroupHandle, asked: list[Request], expected: dict[str, list[int]], random: Random
) -> None:
    async with following(group) as (client, answering):
        before = await client.current_stats()
        live = asyncio.create_task(answered(answering, asked))
        for victim in ("shard 0", "coordinator", "shard 1", "shard 0"):
            await eventually(lambda: client.healthy, 60)
            await asyncio.sleep(random.uniform(0.05, 0.4))
            pids = pids_of(group)
            if random.random() < 0.5:
                stopped = pids[random.choice(["shard 0", "shard 1"])]
                os.kill(stopped, signal.SIGSTOP)
                asyncio.get_running_loop().call_later(random.uniform(0.5, 2), let_go_on, stopped)
            assert not live.done()
            os.kill(pids[victim], signal.SIGKILL)
            await eventually(lambda: not client.healthy, 10)
        answers = await live
        after = await client.current_stats()
    assert tokens_in(answers) == expected
    assert after.epoch >= before.epoch + 4
    assert (after.running, after.waiting, after.num_used_blocks) == (0, 0, 0)
    assert len(group.process_ids()) == 3
    assert not list(Path("/dev/shm").glob(f"latentray-{session_name()}-*"))
    states = [table["state"] for table in ray.util.placement_group_table().values()]
    assert states.count("CREATED") == 1
    assert len(ray.util.list_named_actors(all_namespaces=True)) == 3


def let_go_on(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
        os.kill(pid, signal.SIGCONT)
