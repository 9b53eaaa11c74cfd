"""What a process without a group's keys can do on its channels: nothing; and what that does to the group."""

import asyncio
import dataclasses
import os
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq

from actors import messages
from actors.messages import StepOutput
from actors.stats import GroupStats
from actors.transport import request_channel, step_channel
from actors.transport.channel_keys import ChannelKeys, GroupKeys, MemberKeys, proof
from actors.transport.request_channel import GroupBeat, Hello
from actors.transport.step_channel import ShardEnd, ShardGone
from cluster.answering.group_client import GroupClient
from kernels_integration.errors import UnavailableError
from tests.support.scripted_coordinator import step_input, step_output
from tests.unit.transport.test_step_channel import Inbox, wait_until

KEYS = GroupKeys.draw()
STRANGE = GroupKeys.draw()


def half_known() -> MemberKeys:
    """Of one who has overheard the server's public key, but is no member."""
    return dataclasses.replace(STRANGE.steps.member, server=KEYS.steps.server.public)


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    inbox = Inbox(step_channel.CoordinatorEnd(1, tick_s=0.05, keys=KEYS.steps.server))
    yield inbox
    inbox.end.close()


@pytest.fixture
def shard(inbox: Inbox, context: "zmq.Context[Any]") -> Iterator[ShardEnd]:
    shard = ShardEnd(inbox.end.address, 0, beat_s=0.05, context=context, keys=KEYS.steps.member)
    shard.ready()
    inbox.wait_ready()
    yield shard
    shard.close()


def still_works(inbox: Inbox, shard: ShardEnd) -> None:
    """A step goes there, and its report back."""
    before = len(inbox.messages)
    inbox.end.send(step_input(1))
    assert shard.receive() is not None
    shard.report(step_output(1))
    inbox.wait_messages(before + 1)
    assert steps_of(inbox.messages[before:]) == [1]


def steps_of(messages: Sequence[object]) -> list[int]:
    return [message.step for message in messages if isinstance(message, StepOutput)]


def refusals(inbox: Inbox) -> Callable[[int], bool]:
    def reached(number: int) -> bool:
        inbox.pump()
        inbox.end.tick()
        return inbox.end.num_refused >= number

    return reached


@pytest.mark.parametrize("keys", [None, STRANGE.steps.member, "half known"], ids=["none", "others", "half"])
def test_a_stranger_neither_takes_a_shards_place_nor_reads_its_steps(
    inbox: Inbox, shard: ShardEnd, context: "zmq.Context[Any]", keys: MemberKeys | str | None
) -> None:
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, b"0.0.steps")
    stranger.setsockopt(zmq.LINGER, 0)
    if keys is not None:
        (half_known() if keys == "half known" else keys).lock(stranger)
    stranger.connect(inbox.end.address.partition(",")[0])
    header = struct.pack("<BIi", 3, 0, 0)
    stranger.send_multipart((header, messages.encode(step_output(1))))
    wait_until(lambda: refusals(inbox)(1))
    still_works(inbox, shard)
    assert not stranger.poll(200), "it reads a step"
    assert inbox.end.num_malformed == 0, "its message was read"


def test_a_stranger_cannot_end_a_shard_by_its_lifeline(inbox: Inbox, shard: ShardEnd) -> None:
    """Whatever greets with its name and goes would be its end: without the secret, with another one, with the
    greeting that was overheard, and late."""
    greeting = struct.pack("<4sIi", b"LRL2", 0, 0)
    overheard = greeting + proof(KEYS.steps.member.lifeline, greeting)
    for number, sent in enumerate(
        (greeting + bytes(32), greeting + proof(b"", greeting), overheard, b"GET / HTTP/1.1\r\n\r\n"), 1
    ):
        with socket.create_connection(("127.0.0.1", inbox.end.lifelines.port)) as stranger:
            stranger.sendall(sent)
            stranger.settimeout(5)
            wait_until(lambda number=number: refusals(inbox)(number))
            assert stranger.recv(1) == b"", "it is let in"
    still_works(inbox, shard)
    assert ShardGone(0) not in inbox.messages


def test_connections_that_say_nothing_do_not_pile_up(inbox: Inbox, shard: ShardEnd) -> None:
    idle = []
    for _ in range(300):
        idle.append(socket.create_connection(("127.0.0.1", inbox.end.lifelines.port)))
        inbox.pump()
    wait_until(lambda: refusals(inbox)(300 - 256))
    still_works(inbox, shard)
    assert len(inbox.end.lifelines._greetings) == 256
    for connection in idle:
        connection.close()


def test_garbage_and_a_flood_of_connections_are_counted_and_nothing_slows(
    inbox: Inbox, shard: ShardEnd
) -> None:
    host, port = inbox.end.address.partition(",")[0].removeprefix("tcp://").split(":")
    seeded = random.Random(5)
    zmtp = b"\xff\0\0\0\0\0\0\0\1\x7f\x03\0CURVE".ljust(64, b"\0")
    for number in range(200):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(zmtp * (number % 2) + seeded.randbytes(seeded.randrange(1, 4096)))
    wait_until(lambda: refusals(inbox)(50), timeout_s=20)
    still_works(inbox, shard)
    assert inbox.end.num_malformed == 0


def test_what_is_overheard_cannot_be_sent_again(inbox: Inbox, context: "zmq.Context[Any]") -> None:
    """A wire-tap records a shard's whole connection and plays it once more: CURVE's nonces are of one
    connection."""
    host, port = inbox.end.address.partition(",")[0].removeprefix("tcp://").split(":")
    said = bytearray()
    with socket.create_server((host, 0)) as tap:
        tapped = f"tcp://{host}:{tap.getsockname()[1]},{inbox.end.lifelines.port}"
        shard = ShardEnd(tapped, 0, beat_s=0.05, context=context, keys=KEYS.steps.member)
        shard.ready()
        shard.report(step_output(7))
        client, _ = tap.accept()
        with client, socket.create_connection((host, int(port))) as server:
            _forward(client, server, said, lambda: inbox.pump() and bool(inbox.messages))
        shard.close()
    assert steps_of(inbox.messages) == [7]
    before = len(inbox.messages)
    with socket.create_connection((host, int(port))) as replay:
        replay.sendall(said)
        wait_until(lambda: refusals(inbox)(1))
    inbox.pump()
    assert 7 not in steps_of(inbox.messages[before:])


def _forward(
    client: socket.socket, server: socket.socket, said: bytearray, is_over: Callable[[], bool]
) -> None:
    """Between both, until is_over; what the client says is kept."""
    for line in (client, server):
        line.setblocking(False)
    deadline_s = time.monotonic() + 10
    while not is_over():
        assert time.monotonic() < deadline_s
        for line, other in ((client, server), (server, client)):
            try:
                data = line.recv(65536)
            except BlockingIOError:
                continue
            other.sendall(data)
            said += data if line is client else b""
        time.sleep(0.001)


async def test_a_front_end_without_keys_is_not_answered_and_a_false_coordinator_not_believed(
    context: "zmq.Context[Any]",
) -> None:
    end = request_channel.CoordinatorEnd(keys=KEYS.requests.server)
    strangers = [GroupClient(end.address), GroupClient(end.address, keys=STRANGE.requests.member)]
    # The keys of the other channel do not open this one.
    strangers.append(GroupClient(end.address, keys=KEYS.steps.member))
    for stranger in strangers:
        with pytest.raises(UnavailableError, match="did not answer"):
            await stranger.connect(timeout_s=0.3)
        assert end.receive() == []
        await stranger.close()
    end.take_lost()
    assert end.num_refused >= len(strangers)
    client = GroupClient(end.address, keys=KEYS.requests.member)
    connecting = asyncio.create_task(client.connect())
    while not (arrived := end.receive()):
        await asyncio.sleep(0.01)
    [(name, hello)] = arrived
    assert hello == Hello()
    end.beat(GroupBeat(True, "", GroupStats()), name)
    await connecting
    await client.close()
    end.close()

    false = request_channel.CoordinatorEnd(keys=STRANGE.requests.server)
    client = GroupClient(false.address, keys=KEYS.requests.member)
    with pytest.raises(UnavailableError, match="did not answer"):
        await client.connect(timeout_s=0.3)
    assert false.receive() == []
    await client.close()
    false.close()


def test_secrets_are_not_shown() -> None:
    keys = ChannelKeys.draw()
    shown = repr(keys)
    for secret in (keys.server.secret, keys.member.secret, keys.member.lifeline):
        assert repr(secret) not in shown


def test_another_epoch_or_rank_is_not_proven() -> None:
    secret = os.urandom(32)
    one, other = (struct.pack("<4sIi", b"LRL2", epoch, 0) for epoch in (0, 1))
    assert proof(secret, one) != proof(secret, other)
