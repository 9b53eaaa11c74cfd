"""A server of two groups: what dies in one goes on, there or at the other."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from safetensors.torch import load_file, save_file

from cluster.client import AsyncClient
from cluster.config import ServeArgs
from cluster.control.client import carry_out
from cluster.control.command import Command
from cluster.launch.serving import RunningServer, start_server
from kernels_integration.errors import CheckpointError, ConfigError
from tests.support.ray_groups import CHECKPOINT, PROMPTS, eventually, is_alive

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
        num_spares=1,
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


def spares_of(server: RunningServer, group: int) -> set[int]:
    """The processes of those that wait, once all have started."""
    return {
        node.pid for node in ray.get([warm for _, _, warm, _ in server.groups[group]._group._spares._waiting])
    }


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
            spares = await asyncio.to_thread(spares_of, server, 1)
            assert len(spares) == 2, "a coordinator and a shard"
            for victim in victims:
                os.kill(pids[victim], signal.SIGKILL)
            assert await live == undisturbed
            assert (await client.health()).healthy
            if len(victims) == 1:
                async with asyncio.timeout(30):  # the gateway has gone over to the next coordinator
                    while (await client.loads())[1].stats.epoch != 1:  # type: ignore[union-attr]
                        await asyncio.sleep(0.1)
                assert server.groups[1].placement["group 1 coordinator"].pid in spares
        await eventually(lambda: server.groups[1].failure is not None, 20)
        assert server.failure is None, "one group is left"
        assert not any(map(is_alive, pids.values()))
        assert await answers(client) == undisturbed
        assert len(await client.loads()) == 2
    said = await ordered(server, do="restart", where="1")
    assert said[-1] == "group 1: serving", "an operator's restart is a new beginning"
    assert server.groups[1].failure is None


async def ordered(server: RunningServer, **order: Any) -> list[str]:
    """What the server said of an order, but for what it waited for."""
    said = await asyncio.to_thread(lambda: list(carry_out(server.address, Command(**order))))
    return [text for text in said if "waiting for" not in text]


async def test_streams_outlive_a_drain_and_a_rolling_restart(server: RunningServer) -> None:
    async with AsyncClient(server.address, decode=False) as client:
        undisturbed = await answers(client)
        orders: list[tuple[dict[str, Any], list[str]]] = [
            (
                {"do": "drain", "where": "0"},
                ["group 0: drained: nothing runs there, and no new request comes"],
            ),
            ({"do": "undrain", "where": "0"}, ["group 0: serves again"]),
            ({"do": "restart"}, ["group 0: serving", "group 1: serving"]),
        ]
        for order, expected in orders:
            told: list[int] = []
            pids = {number: pids_of(server, number) for number in range(2)}
            live = asyncio.create_task(answers(client, told))
            await eventually(lambda told=told: len(told) > 200, 30)  # type: ignore[misc]
            said = await ordered(server, **order)
            assert [text for text in said if text in expected] == expected
            assert await live == undisturbed
            assert (await client.health()).healthy
            for number in range(2):
                assert (pids_of(server, number) != pids[number]) == (order["do"] == "restart")
        assert await answers(client) == undisturbed
    with pytest.raises(ConfigError, match="there is no group 2"):
        await ordered(server, do="drain", where="2")
    assert all(group.failure is None for group in server.groups)


async def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_touched(
    server: RunningServer, tmp_path: Path
) -> None:
    pids = [pids_of(server, number) for number in range(2)]
    with pytest.raises(CheckpointError, match="no such model path"):
        await ordered(server, do="restart", model=str(tmp_path / "none"))
    shutil.copytree(CHECKPOINT, tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"its tokenizer\.json is another"):
        await ordered(server, do="restart", model=str(tmp_path / "other"))
    assert [pids_of(server, number) for number in range(2)] == pids


async def test_new_weights_are_rolled_and_each_stream_ends_with_those_it_began_with(
    server: RunningServer, tmp_path: Path
) -> None:
    shutil.copytree(CHECKPOINT, tmp_path / "new")
    reorder_weights(tmp_path / "new")
    async with AsyncClient(server.address, decode=False) as client:
        old = await answers(client)
        told: list[int] = []
        live = asyncio.create_task(answers(client, told))
        await eventually(lambda: len(told) > 200, 30)
        await ordered(server, do="restart", model=str(tmp_path / "new"))
        assert await live == old
        new = await answers(client)
    assert all(one != other for one, other in zip(new, old, strict=True))


def reorder_weights(folder: Path) -> None:
    """Another model of the same shapes: its final norm is turned around."""
    path = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].flip(0).contiguous()
    save_file(tensors, path)
