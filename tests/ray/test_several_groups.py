"""A server of two groups: what dies in one goes on, there or at the other."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from cluster.client import AsyncClient
from cluster.config import ServeArgs
from cluster.launch.serving import RunningServer, start_server
from tests.support.ray_groups import PROMPTS, eventually, is_alive

pytestmark = pytest.mark.ray

ASKED = [(prompt, temperature) for prompt in PROMPTS for temperature in (0.0, 0.8)] + [(PROMPTS[0], 1.2)] * 2


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    args = ServeArgs(
        num_groups=2,
        port=0,
        http_port=0,
        dtype="float64",  # another batch must not decide
        max_model_len=512,
        num_kv_blocks=160,
        max_restarts=1,
    )
    with start_server(args) as server:
        yield server


async def answers(client: AsyncClient, told: list[int] | None = None) -> list[tuple[int, ...]]:
    """All streams at once; told: gets their tokens as they come, whosever they are."""

    async def answer(number: int) -> tuple[int, ...]:
        prompt, temperature = ASKED[number]
        tokens: list[int] = []
        async for piece in client.generate(
            prompt, temperature=temperature, seed=number, max_tokens=200, ignore_eos=True
        ):
            tokens += piece.token_ids
            if told is not None:
                told.extend(piece.token_ids)
        return tuple(tokens)

    return list(await asyncio.gather(*map(answer, range(len(ASKED)))))


def pids_of(server: RunningServer, group: int) -> dict[str, int]:
    return {name: pid for name, pid in server.process_ids().items() if name.startswith(f"group {group} ")}


async def test_streams_outlive_a_coordinator_then_its_whole_group(server: RunningServer) -> None:
    async with AsyncClient(server.address, decode=False) as client:
        undisturbed = await answers(client)
        await asyncio.sleep(1)  # for the groups' next heartbeats
        loads = await client.loads()
        assert [load.stats is not None and load.stats.num_finished for load in loads] == [4, 4]
        for victims in (["group 1 coordinator"], ["group 1 coordinator", "group 1 shard 0"]):
            told: list[int] = []
            pids = pids_of(server, 1)
            assert set(pids) == {"group 1 coordinator", "group 1 shard 0"}
            live = asyncio.create_task(answers(client, told))
            await eventually(lambda told=told: len(told) > 200, 30)  # type: ignore[misc]
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            assert await live == undisturbed
            assert (await client.health()).healthy
            if len(victims) == 1:
                async with asyncio.timeout(30):  # the gateway has gone over to the next coordinator
                    while (await client.loads())[1].stats.epoch != 1:  # type: ignore[union-attr]
                        await asyncio.sleep(0.1)
        await eventually(lambda: server.groups[1].failure is not None, 20)
        assert server.failure is None, "one group is left"
        assert not any(map(is_alive, pids.values()))
        assert await answers(client) == undisturbed
        assert len(await client.loads()) == 2
