"""A real group of two shards on a Ray cluster of its own."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.answering.group_client import GroupClient
from cluster.launch.group import GroupHandle, launch_group
from tests.support.ray_groups import eventually, group_config, inline_tokens, requests, served_tokens
from tests.support.streams import stream

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def group() -> Iterator[GroupHandle]:
    with launch_group(group_config(2, 2), address="local") as handle:
        yield handle


async def test_streams_equal_those_of_one_rank_in_process(group: GroupHandle) -> None:
    async with GroupClient(group.request_address, keys=group.request_keys) as client:
        assert (client.healthy, group.collectives) == (True, "shared_memory")
        batch = requests()
        assert await served_tokens(client, batch) == inline_tokens(batch)
        await eventually(lambda: client.stats is not None and client.stats.num_finished == len(batch), 3)


async def test_blocks_are_back_after_an_abort(group: GroupHandle) -> None:
    async with GroupClient(group.request_address, keys=group.request_keys) as client:
        await eventually(lambda: client.stats is not None and client.stats.num_used_blocks == 0, 3)
        updates = stream(client, requests(400, ignore_eos=True)[0])
        async for _ in updates:
            break
        await updates.aclose()
        await eventually(
            lambda: (
                client.stats is not None
                and client.stats.num_aborted == 1
                and client.stats.num_used_blocks == 0
            ),
            3,
        )


def test_each_actor_tells_its_memory_and_node(group: GroupHandle) -> None:
    memory = group.memory()
    assert list(memory) == ["coordinator", "shard 0", "shard 1"] == list(group.placement)
    # A shard holds torch and its slice of the checkpoint; the coordinator imports no torch.
    assert 30e6 < memory["coordinator"] < 250e6 < memory["shard 0"] < 1e9


def test_the_group_uses_one_thread_a_shard(group: GroupHandle) -> None:
    environment = Path(f"/proc/{group.process_ids()['shard 0']}/environ").read_bytes().split(b"\0")
    assert b"OMP_NUM_THREADS=1" in environment


async def test_an_idle_group_uses_next_to_no_cpu(group: GroupHandle) -> None:
    def cpu_ticks() -> int:
        total = 0
        for pid in group.process_ids().values():
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    before = cpu_ticks()
    await asyncio.sleep(2)
    used_s = (cpu_ticks() - before) / os.sysconf("SC_CLK_TCK")
    assert used_s < 0.3, f"three actors used {used_s} s of CPU in 2 idle seconds"
