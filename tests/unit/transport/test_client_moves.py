"""A front end whose coordinator is gone: what it waits for, and how it goes over to the next one."""

import asyncio

import pytest

from cluster.answering.group_client import ClientFollower, GroupClient
from kernels_integration.errors import UnavailableError
from tests.support import streams
from tests.support.loop_group import LoopGroup, endless, eventually
from tests.support.scripted_coordinator import request


async def test_a_client_follows_its_group_to_the_next_coordinator() -> None:
    first, second = LoopGroup(endless(0.005)), LoopGroup()
    first.start()
    second.start()
    async with GroupClient(first.address, recovery_s=60) as client:
        follower = ClientFollower(client, asyncio.get_running_loop().call_soon_threadsafe)
        await eventually(lambda: client.healthy)
        live = asyncio.create_task(streams.tokens_of(client, request("r", 10**6)))
        await eventually(lambda: bool(first.coordinator.live))
        first.stop()
        with pytest.raises(UnavailableError):
            await live
        await eventually(lambda: client.is_recovering and "was closed" in client.message)
        assert not client.healthy
        await asyncio.to_thread(follower.moved, second.address)
        await eventually(lambda: client.healthy)
        assert not client.is_recovering
        assert await streams.tokens_of(client, request("r", 3)) == [0, 1, 2]
        assert (await client.current_stats()).num_steps == second.coordinator.step
    second.stop()


@pytest.mark.parametrize("end", ["told", "waited"])
async def test_a_client_gives_up_when_it_is_told_or_has_waited_long_enough(end: str) -> None:
    group = LoopGroup()
    group.start()
    async with GroupClient(group.address, recovery_s=60 if end == "told" else 0.2) as client:
        await eventually(lambda: client.healthy)
        group.stop()
        await eventually(lambda: client.is_recovering)
        if end == "told":
            client.lose("too many coordinators have died")
            assert client.message == "too many coordinators have died"
        await eventually(lambda: not client.is_recovering, 2)
        assert not client.healthy


async def test_without_recovery_a_closed_connection_is_the_end() -> None:
    group = LoopGroup()
    group.start()
    async with GroupClient(group.address) as client:
        await eventually(lambda: client.healthy)
        group.stop()
        await eventually(lambda: "was closed" in client.message)
        assert not client.is_recovering


async def test_a_successor_may_be_known_before_the_end_of_the_one_before() -> None:
    """A spare process takes over within milliseconds: streams wait for it as for any other."""
    first, second = LoopGroup(), LoopGroup()
    first.start()
    second.start(ready=False)
    async with GroupClient(first.address, recovery_s=60) as client:
        await eventually(lambda: client.healthy)
        client.move(second.address)
        assert not client.healthy
        assert client.is_recovering
    first.stop()
    second.stop()
