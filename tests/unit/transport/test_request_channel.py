"""The request channel under bad messages, pauses of either end, and faults of single requests."""

import asyncio
import time
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from actors.requests import Request, SequenceKey
from actors.transport import request_channel
from actors.transport.request_channel import Abort, CoordinatorEnd, Hello, Submit, Updates
from cluster.answering.group_client import GroupClient
from kernels_integration.errors import InvalidRequestError, LatentrayError, UnavailableError
from tests.support import streams
from tests.support.loop_group import LoopGroup, endless, eventually, served
from tests.support.scripted_coordinator import ScriptedCoordinator, request

NESTED = b"\x91" * 200_000 + b"\xc0"


def submit_with(body: bytes, name: str = "bad") -> bytes:
    return request_channel.encode(Submit(SequenceKey(name), body))


def changed(*, params: Any = None, **fields: Any) -> bytes:
    """A request with illegal values, as no front end of ours sends it."""
    body = msgspec.to_builtins(request("bad"))
    told = body["params"] | params if isinstance(params, dict) else params or body["params"]
    return msgspec.msgpack.encode(body | fields | {"params": told})


UNREADABLE = {
    "nothing": b"",
    "noise": b"\xc1\xff\x00",
    "nested": NESTED,
    "another tag": msgspec.msgpack.encode({"type": "Format", "disk": "c"}),
    "no fields": msgspec.msgpack.encode({"type": "Submit"}),
    "a key of numbers": msgspec.msgpack.encode({"type": "Abort", "keys": [[1, 2, 3]]}),
    "a huge incarnation": msgspec.msgpack.encode({"type": "Abort", "keys": [["r", 2**64 - 1, {}]]}),
}
BAD_REQUESTS = {
    "noise": b"\xc1",
    "nested": NESTED,
    "temperature": changed(params={"temperature": -1.0}),
    "params of another type": changed(params=5),
    "negative token": changed(prompt_token_ids=[-1]),
    "token beyond int32": changed(prompt_token_ids=[2**31]),
    "negative seed": changed(seed=-1),
    "priority": changed(priority=2**63),
    "another's key": changed(request_id="other"),
    "infinite penalty": changed(params={"repetition_penalty": float("inf")}),
}


@pytest.mark.parametrize("data", UNREADABLE.values(), ids=UNREADABLE)
async def test_what_cannot_be_read_is_dropped_and_counted(data: bytes) -> None:
    group = LoopGroup(endless(0.002))
    async with served(group) as client:
        live = asyncio.create_task(streams.tokens_of(client, request("live", 10**6)))
        await eventually(lambda: len(group.coordinator.live) == 1)
        stranger: zmq.Socket[bytes] = group.context.socket(zmq.DEALER)
        stranger.connect(group.address)
        stranger.send(data)
        await eventually(lambda: group.desk_end.num_ignored == 1)
        assert await streams.tokens_of(client, request("after")) == [0, 1, 2]
        assert client.healthy
        assert not live.done()
        live.cancel()
        stranger.close(linger=0)


@pytest.mark.parametrize("body", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
async def test_a_request_that_cannot_be_taken_fails_alone(body: bytes) -> None:
    group = LoopGroup(endless(0.002))
    async with served(group) as client:
        live = asyncio.create_task(streams.tokens_of(client, request("live", 10**6)))
        await eventually(lambda: len(group.coordinator.live) == 1)
        stranger: zmq.Socket[bytes] = group.context.socket(zmq.DEALER)
        stranger.connect(group.address)
        stranger.send(submit_with(body))
        answers: list[Any] = []

        def answered() -> bool:
            while stranger.poll(0):
                message = request_channel.decode_to_client(stranger.recv())
                if isinstance(message, Updates):
                    answers.extend(message.failures)
            return bool(answers)

        await eventually(answered)
        [failed] = answers
        assert (failed.key, failed.code) == (SequenceKey("bad"), InvalidRequestError.code)
        assert await streams.tokens_of(client, request("after")) == [0, 1, 2]
        assert not live.done()
        live.cancel()
        stranger.close(linger=0)


@given(st.binary(max_size=200))
def test_no_bytes_get_through_the_decoder_as_anything_but_a_message(data: bytes) -> None:
    context: zmq.Context[Any] = zmq.Context()
    end = CoordinatorEnd(context=context)
    try:
        peer = context.socket(zmq.DEALER)
        peer.connect(end.address)
        peer.send(data)
        peer.send(request_channel.encode(Abort((SequenceKey("last"),))))
        found: list[Any] = []
        while not (found and found[-1][1] == Abort((SequenceKey("last"),))):
            end.socket.poll(1000)
            found += end.receive()
        assert len(found) - 1 + end.num_ignored == 1 or isinstance(found[0][1], Hello)
        peer.close(linger=0)
    finally:
        end.close()
        context.destroy(linger=0)


async def test_an_unexpected_fault_of_one_submission_fails_it_alone() -> None:
    group = LoopGroup(endless(0.002))
    submit = group.coordinator.submit

    def sometimes(asked: Request) -> None:
        submit(asked)
        if asked.request_id == "bad":
            raise ZeroDivisionError("a bug, after it was queued")

    group.coordinator.submit = sometimes  # type: ignore[method-assign]
    async with served(group) as client:
        with pytest.raises(LatentrayError, match="ZeroDivisionError") as caught:
            await streams.tokens_of(client, request("bad", 10**6))
        assert caught.value.code == "internal"
        assert group.coordinator.aborted == ["bad"], "nothing of it stays"
        assert await streams.tokens_of(client, request("good")) == [0, 1, 2]


async def test_a_front_end_cannot_end_or_take_the_requests_of_another() -> None:
    group = LoopGroup(endless(0.002))
    async with served(group) as client:
        mine = request("mine", 10**6)
        live = asyncio.create_task(streams.tokens_of(client, mine))
        await eventually(lambda: len(group.coordinator.live) == 1)
        stranger: zmq.Socket[bytes] = group.context.socket(zmq.DEALER)
        stranger.connect(group.address)
        stranger.send(request_channel.encode(Abort((mine.key,))))
        stranger.send(request_channel.encode(Abort((SequenceKey("mine", 1), SequenceKey("mine", 0, 1)))))
        assert await streams.tokens_of(client, request("after")) == [0, 1, 2]
        assert not live.done()
        assert not group.coordinator.aborted
        live.cancel()
        stranger.close(linger=0)


async def test_streams_that_fail_here_end_at_a_coordinator_that_was_only_away() -> None:
    """Its clients have given it up; what they asked for must not run on with no reader."""
    group = LoopGroup(endless(0.002))
    async with served(group) as client:  # gives up after 1 s
        live = asyncio.create_task(streams.tokens_of(client, request("r", 10**6)))
        await eventually(lambda: len(group.coordinator.live) == 1)
        group.pause(2.5)
        with pytest.raises(UnavailableError, match="no heartbeat"):
            await live
        assert len(group.coordinator.live) == 1
        await eventually(lambda: group.coordinator.aborted == ["r"])
        await eventually(lambda: client.healthy)
        assert await streams.tokens_of(client, request("r")) == [0, 1, 2]


async def test_a_coordinator_that_is_silent_is_slow_and_gets_nothing_new() -> None:
    group = LoopGroup(endless(0.002))
    group.start()
    async with GroupClient(group.address, silence_s=0.5) as client:
        await eventually(lambda: client.healthy)
        live = asyncio.create_task(streams.tokens_of(client, request("r", 10**6)))
        await eventually(lambda: len(group.coordinator.live) == 1)
        num_steps = group.coordinator.step
        group.pause(2.5)
        await eventually(lambda: not client.healthy)
        with pytest.raises(UnavailableError, match="no heartbeat"):
            await streams.tokens_of(client, request("late"))
        await eventually(lambda: client.healthy)
        await eventually(lambda: group.coordinator.step > num_steps + 20)
        assert not live.done(), "the stream went on"
        live.cancel()
    group.stop()


async def test_a_closed_connection_is_a_death_and_known_at_once() -> None:
    context: zmq.Context[Any] = zmq.Context()
    end = CoordinatorEnd(context=context)
    client = GroupClient(end.address, silence_s=600)
    connecting = asyncio.create_task(client.connect())
    await eventually(lambda: bool(end.receive()))
    stats = msgspec.structs.replace(ScriptedCoordinator().stats(), running=3, waiting=2)
    end.beat(request_channel.GroupBeat(healthy=True, message="ready", stats=stats))
    await connecting
    assert client.stats == stats
    live = asyncio.create_task(streams.tokens_of(client, request("r")))
    await eventually(lambda: bool(end.receive()))
    end.close()
    with pytest.raises(UnavailableError, match="was closed"):
        await asyncio.wait_for(live, 5)
    assert not client.healthy
    assert "was closed" in client.message
    assert client.stats is not None
    assert (client.stats.running, client.stats.waiting) == (0, 0), "what is gone runs nothing"
    await client.close()
    context.destroy(linger=0)


async def test_a_group_that_failed_for_good_ends_streams_though_its_coordinator_lives() -> None:
    """Where Ray is lost, nobody may be left to end the coordinator at once."""
    group = LoopGroup(endless(0.002))
    group.start()
    async with GroupClient(group.address) as client:
        await eventually(lambda: client.healthy)
        live = asyncio.create_task(streams.tokens_of(client, request("r", 10**6)))
        await eventually(lambda: len(group.coordinator.live) == 1)
        client.lose("Ray is gone")
        with pytest.raises(UnavailableError, match="Ray is gone"):
            await asyncio.wait_for(live, 5)
        await eventually(lambda: not group.coordinator.live)
        await asyncio.sleep(2 * request_channel.BEAT_S)  # it still says that it is well
        assert not client.healthy
        assert client.message == "Ray is gone"
    group.stop()


async def test_a_coordinator_that_was_away_does_not_take_its_clients_for_dead() -> None:
    group = LoopGroup(endless(0.002), client_silence_s=1.2)
    group.start()
    async with GroupClient(group.address, silence_s=30) as client:
        await eventually(lambda: client.healthy)
        live = asyncio.create_task(streams.tokens_of(client, request("r", 10**6)))
        await eventually(lambda: len(group.coordinator.live) == 1)
        num_steps = group.coordinator.step
        group.pause(2.5)
        await eventually(lambda: group.coordinator.step > num_steps + 20)
        assert not live.done()
        live.cancel()
    group.stop()


async def test_a_front_end_whose_connection_is_closed_is_gone_at_once() -> None:
    """Killed, say: it says no goodbye, and silence alone would take a minute."""
    group = LoopGroup(endless(0.002), client_silence_s=600)
    async with served(group) as client:
        killed: zmq.Socket[bytes] = group.context.socket(zmq.DEALER)
        killed.connect(group.address)
        killed.send(request_channel.encode(Submit.of(request("orphan", 10**6))))
        live = asyncio.create_task(streams.tokens_of(client, request("live", 10**6)))
        await eventually(lambda: len(group.coordinator.live) == 2)
        killed.close(linger=0)
        await eventually(lambda: group.coordinator.aborted == ["orphan"])
        assert not live.done()
        live.cancel()


async def test_a_front_end_that_was_away_too_long_is_told_unavailable_and_not_aborted() -> None:
    """Only a user's abort may look like one."""
    group = LoopGroup(endless(0.002), client_silence_s=0.4)
    async with served(group) as client:
        live = asyncio.create_task(streams.tokens_of(client, request("r", 10**6)))
        await eventually(lambda: len(group.coordinator.live) == 1)
        time.sleep(1.5)  # the event loop, and so the client's heartbeats, stand still
        with pytest.raises(UnavailableError, match="not heard from"):
            await live
        assert group.coordinator.aborted == ["r"]
