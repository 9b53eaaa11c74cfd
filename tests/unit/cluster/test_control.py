"""Orders to a running server: who may give them, one at a time, and what is said of them."""

import asyncio

import grpc
import pytest
from grpc import aio

from cluster.control import client
from cluster.control.command import Command
from cluster.control.desk import ControlDesk
from cluster.gateway import control_service
from kernels_integration.errors import ConfigError, InvalidRequestError, LatentrayError, OverloadedError

DRAIN = Command(do="drain", where="0")


async def said(desk: ControlDesk, command: Command) -> list[str]:
    return [text async for text in desk.carry_out(command)]


async def test_an_order_is_fetched_and_what_is_said_of_it_arrives_in_order() -> None:
    desk = ControlDesk()
    giving = asyncio.create_task(said(desk, DRAIN))
    assert await desk.fetch() == DRAIN
    for text in ("one", "two"):
        desk.say(text)
    desk.end()
    assert await giving == ["one", "two"]


async def test_a_second_order_waits_for_nobody_and_a_failed_one_frees_the_desk() -> None:
    desk = ControlDesk()
    giving = asyncio.create_task(said(desk, DRAIN))
    await desk.fetch()
    with pytest.raises(OverloadedError, match="drain 0 goes on"):
        await said(desk, Command(do="restart"))
    desk.end("invalid_config", "there is no group 0")
    with pytest.raises(ConfigError, match="there is no group 0"):
        await giving
    giving = asyncio.create_task(said(desk, Command(do="undrain", where="0")))
    assert (await desk.fetch()).do == "undrain"
    desk.end()
    assert await giving == []


async def test_who_gave_an_order_may_leave() -> None:
    desk = ControlDesk()
    giving = asyncio.create_task(said(desk, DRAIN))
    await desk.fetch()
    giving.cancel()
    await asyncio.gather(giving, return_exceptions=True)
    with pytest.raises(OverloadedError):
        await said(desk, DRAIN)
    desk.say("to nobody")
    desk.end()
    again = asyncio.create_task(said(desk, DRAIN))
    assert await desk.fetch() == DRAIN
    desk.end()
    assert await again == []


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.7:4242", "ipv6:[fe80::1]:4242", "ipv4:12.7.0.1:1"])
def test_orders_come_from_this_machine_alone(peer: str) -> None:
    with pytest.raises(InvalidRequestError, match="from its own machine alone"):
        control_service._command(b'{"do": "drain", "where": "0"}', peer)


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:5", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5", "unix:"])
@pytest.mark.parametrize("data", [b"", b"{}", b'{"do": "explode"}', b'{"do": "drain", "more": 1}', b"\xff"])
def test_garbage_is_no_order(peer: str, data: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="this is no order"):
        control_service._command(data, peer)


async def test_over_the_wire() -> None:
    desk, server = ControlDesk(), aio.server()
    control_service.add_control(desk, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    async def carry_out_all() -> None:
        assert (await desk.fetch()).where == "0"
        desk.say("emptying")
        desk.end()
        await desk.fetch()
        desk.end("unavailable", "the server stops")

    work = asyncio.create_task(carry_out_all())
    give = lambda: list(client.carry_out(f"127.0.0.1:{port}", DRAIN))  # noqa: E731
    assert await asyncio.to_thread(give) == ["emptying"]
    with pytest.raises(LatentrayError, match="the server stops"):
        await asyncio.to_thread(give)
    await work
    await server.stop(None)


def test_a_server_that_knows_no_orders_says_so() -> None:
    from concurrent.futures import ThreadPoolExecutor

    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with pytest.raises(LatentrayError, match="takes no orders"):
        list(client.carry_out(f"127.0.0.1:{port}", DRAIN))
    server.stop(None)
