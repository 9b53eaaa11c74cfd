"""The step channel over loopback: order, epochs, liveness, failures."""

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from actors.messages import StepOutput
from actors.transport.step_channel import CoordinatorEnd, ShardEnd, ShardFailure, ShardGone
from kernels_integration.errors import UnavailableError
from tests.support.scripted_coordinator import step_input, step_output


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    context: zmq.Context[Any] = zmq.Context()
    yield context
    context.destroy(linger=0)


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.002)


class Inbox:
    """Collects what a coordinator end receives."""

    def __init__(self, end: CoordinatorEnd) -> None:
        self.end = end
        self.messages: list[StepOutput | ShardFailure | ShardGone] = []

    def pump(self) -> bool:
        self.messages += self.end.receive()
        return True

    def wait_ready(self) -> None:
        wait_until(lambda: self.pump() and self.end.is_ready)

    def wait_messages(self, count: int) -> None:
        wait_until(lambda: self.pump() and len(self.messages) >= count)


@pytest.fixture
def group(context: "zmq.Context[Any]") -> Iterator[tuple[Inbox, list[ShardEnd]]]:
    end = CoordinatorEnd(2, epoch=3, tick_s=0.05, context=context)
    shards = [ShardEnd(end.address, rank, epoch=3, beat_s=0.05, context=context) for rank in range(2)]
    yield Inbox(end), shards
    for shard in shards:
        shard.close()
    end.close()


def test_a_group_is_ready_when_every_shard_is(group: tuple[Inbox, list[ShardEnd]]) -> None:
    inbox, shards = group
    shards[1].ready()
    wait_until(lambda: inbox.pump() and inbox.end.num_ready == 1)
    assert not inbox.end.is_ready
    shards[0].ready()
    inbox.wait_ready()


def test_every_shard_gets_every_step_in_order_and_rank_0_reports(group: tuple[Inbox, list[ShardEnd]]) -> None:
    inbox, shards = group
    for shard in shards:
        shard.ready()
    inbox.wait_ready()
    sent = [step_input(step, epoch=3, num_requests=step) for step in (1, 2, 3)]
    for step in sent:
        inbox.end.send(step)
    inbox.end.stop_shards()
    for shard in shards:
        for expected in sent:
            step = shard.receive()
            assert step is not None
            assert step.step == expected.step
            np.testing.assert_array_equal(step.slot, expected.slot)
        assert shard.receive() is None
    for step in sent:
        shards[0].report(step_output(step.step, epoch=3))
    inbox.wait_messages(3)
    assert [m.step for m in inbox.messages if isinstance(m, StepOutput)] == [1, 2, 3]


def test_messages_of_an_older_epoch_are_dropped_at_both_ends(context: "zmq.Context[Any]") -> None:
    end = CoordinatorEnd(1, epoch=2, context=context)
    old = ShardEnd(end.address, 0, epoch=1, context=context)
    new = ShardEnd(end.address, 0, epoch=2, context=context)
    inbox = Inbox(end)
    old.ready()
    old.report(step_output(1, epoch=1))
    old.fail("internal", "from the past")
    new.ready()
    inbox.wait_ready()
    new.report(step_output(1, epoch=2))
    inbox.wait_messages(1)
    assert [type(message) for message in inbox.messages] == [StepOutput]
    # The other direction: a coordinator of another epoch that took over the port's peers.
    end.socket.send_multipart((b"2.0.steps", b"\x05" + (1).to_bytes(4, "little") + b"\xff" * 4, b"stale"))
    end.send(step_input(7, epoch=2))
    received = new.receive()
    assert received is not None
    assert received.step == 7
    for shard in (old, new):
        shard.close()
    end.close()


def test_a_shard_inside_a_long_step_beats(group: tuple[Inbox, list[ShardEnd]]) -> None:
    inbox, shards = group
    for shard in shards:
        shard.ready()
    inbox.wait_ready()
    # Neither shard reads its socket now, as in a long step.
    until_s = time.monotonic() + 0.7
    while time.monotonic() < until_s:
        inbox.pump()
        inbox.end.tick()
        assert inbox.end.silent(0.4) == []
        time.sleep(0.02)
    assert inbox.messages == []


def test_a_shard_that_leaves_is_gone_at_once_and_the_other_is_not(
    group: tuple[Inbox, list[ShardEnd]],
) -> None:
    inbox, shards = group
    for shard in shards:
        shard.ready()
    inbox.wait_ready()
    shards[1].close()
    inbox.wait_messages(1)
    assert inbox.messages == [ShardGone(1)]
    assert inbox.end.silent(30) == []  # no clock was needed


def _shard_process(address: str) -> None:
    ShardEnd(address, 0).ready()
    time.sleep(60)


def _start_shard(inbox: Inbox) -> multiprocessing.Process:
    process = multiprocessing.get_context("spawn").Process(
        target=_shard_process, args=(inbox.end.address,), daemon=True
    )
    process.start()
    wait_until(lambda: inbox.pump() and inbox.end.is_ready, timeout_s=60)
    return process


def test_a_killed_process_is_gone_and_a_stopped_one_is_only_silent(context: "zmq.Context[Any]") -> None:
    inbox = Inbox(CoordinatorEnd(1, tick_s=0.05, context=context))
    process = _start_shard(inbox)
    assert process.pid is not None
    try:
        assert inbox.end.name_of(0) == f"shard 0 (process {process.pid})"
        os.kill(process.pid, signal.SIGSTOP)

        def is_silent() -> bool:
            inbox.pump()
            inbox.end.tick()
            return inbox.end.silent(0.8) == [0]

        wait_until(is_silent)
        assert inbox.messages == []
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: not is_silent())
        os.kill(process.pid, signal.SIGKILL)
        inbox.wait_messages(1)
        assert inbox.messages == [ShardGone(0)]
    finally:
        process.kill()
        process.join()
        inbox.end.close()


def test_a_coordinator_that_was_away_blames_nobody(context: "zmq.Context[Any]") -> None:
    now = [0.0]
    inbox = Inbox(CoordinatorEnd(1, tick_s=0.5, clock=lambda: now[0], context=context))
    shard = ShardEnd(inbox.end.address, 0, beat_s=60, context=context)
    shard.ready()
    inbox.wait_ready()
    now[0] = 0.5
    inbox.end.tick()
    now[0] = 40.0  # stopped meanwhile; what the shard has sent is not read yet
    assert inbox.end.silent(3.0) == []
    inbox.end.tick()
    assert inbox.end.silent(3.0) == []
    for _ in range(7):  # here again, and the shard says nothing
        now[0] += 0.5
        inbox.end.tick()
    assert inbox.end.silent(3.0) == [0]
    shard.close()
    inbox.end.close()


def test_a_shard_notices_that_its_coordinator_is_gone(context: "zmq.Context[Any]") -> None:
    end = CoordinatorEnd(1, context=context)
    shard = ShardEnd(end.address, 0, context=context)
    wait_until(lambda: bool(end.receive() or end.name_of(0) != "shard 0"))
    end.close()
    with pytest.raises(UnavailableError, match=r"the coordinator at tcp://127.0.0.1:\d+ is gone"):
        shard.receive()
    shard.close()


def test_an_epoch_begins_with_new_shards_and_without_the_old_ones(context: "zmq.Context[Any]") -> None:
    inbox = Inbox(CoordinatorEnd(1, context=context))
    old = ShardEnd(inbox.end.address, 0, context=context)
    old.ready()
    inbox.wait_ready()
    inbox.end.begin_epoch(1)
    assert not inbox.end.is_ready
    old.close()
    new = ShardEnd(inbox.end.address, 0, epoch=1, context=context)
    new.ready()
    inbox.wait_ready()
    assert inbox.messages == []  # the end of the old one is nobody's loss
    new.close()
    inbox.wait_messages(1)
    inbox.end.close()


def test_a_fatal_error_arrives_with_code_and_text(group: tuple[Inbox, list[ShardEnd]]) -> None:
    inbox, shards = group
    shards[1].fail("invalid_checkpoint", "no such tensor")
    inbox.wait_messages(1)
    assert inbox.messages == [ShardFailure(rank=1, code="invalid_checkpoint", text="no such tensor")]


_HELLO, _OUTPUT, _ERROR = b"\x01", b"\x03", b"\x04"
_OF_RANK_0 = bytes(8)
_NESTED = b"\x91" * 100_000

MALFORMED: dict[str, list[bytes]] = {
    "one frame": [b"x"],
    "four frames": [b"a", b"b", b"c", b"d"],
    "a short header": [b"short", b"x"],
    "a rank that is none": [_HELLO + bytes(4) + (9).to_bytes(4, "little"), b""],
    "a negative rank": [_HELLO + bytes(4) + b"\xff" * 4, b""],
    "an unknown kind": [b"\x63" + _OF_RANK_0, b""],
    "a report that is no msgpack": [_OUTPUT + _OF_RANK_0, b"\xc1"],
    "a report of other fields": [_OUTPUT + _OF_RANK_0, msgspec.msgpack.encode({"epoch": 0})],
    "a report of half an integer": [
        _OUTPUT + _OF_RANK_0,
        msgspec.msgpack.encode([0, 1, *[msgspec.msgpack.Ext(1, b"abc")] * 3]),
    ],
    "a report with an unknown kind of array": [
        _OUTPUT + _OF_RANK_0,
        msgspec.msgpack.encode([0, 1, *[msgspec.msgpack.Ext(77, b"abcd")] * 3]),
    ],
    "a deeply nested report": [_OUTPUT + _OF_RANK_0, _NESTED],
    "a failure that is none": [_ERROR + _OF_RANK_0, b"oops"],
    "a deeply nested failure": [_ERROR + _OF_RANK_0, _NESTED],
    "another rank's failure": [_ERROR + _OF_RANK_0, msgspec.msgpack.encode([1, "internal", "no"])],
}


@pytest.mark.parametrize("name", [b"0.0.steps", b"stranger"], ids=["in a shard's name", "in its own"])
@pytest.mark.parametrize("frames", MALFORMED.values(), ids=MALFORMED)
def test_malformed_messages_are_dropped_and_counted(
    context: "zmq.Context[Any]", frames: list[bytes], name: bytes
) -> None:
    inbox = Inbox(CoordinatorEnd(1, context=context))
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.ROUTING_ID, name)
    stranger.connect(inbox.end.address.rpartition(",")[0])
    stranger.send_multipart(frames)
    wait_until(lambda: inbox.pump() and inbox.end.num_malformed == 1)
    stranger.close()
    shard = ShardEnd(inbox.end.address, 0, context=context)
    shard.ready()
    inbox.wait_ready()
    assert inbox.messages == []
    assert inbox.end.num_malformed == 1
    shard.close()
    inbox.end.close()


def test_a_shard_drops_malformed_steps(context: "zmq.Context[Any]") -> None:
    inbox = Inbox(CoordinatorEnd(1, context=context))
    shard = ShardEnd(inbox.end.address, 0, context=context)
    shard.ready()
    inbox.wait_ready()
    for frames in ([b"x"], [b"x", b"y"], [b"\x05" + _OF_RANK_0, b"\xc1"], [b"\x05" + _OF_RANK_0, _NESTED]):
        inbox.end.socket.send_multipart((b"0.0.steps", *frames))
    inbox.end.send(step_input(1))
    step = shard.receive()
    assert step is not None
    assert step.step == 1
    shard.close()
    inbox.end.close()


def test_strangers_on_the_lifelines_are_nobody(context: "zmq.Context[Any]") -> None:
    inbox = Inbox(CoordinatorEnd(1, context=context))
    port = inbox.end.lifelines.port
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(b"LR")
    strangers[2].sendall(b"LRL2" + bytes(4) + (7).to_bytes(4, "little"))  # a rank that is none
    shard = ShardEnd(inbox.end.address, 0, context=context)
    shard.ready()
    inbox.wait_ready()
    for stranger in strangers:
        stranger.close()
    shard.close()
    inbox.wait_messages(1)
    assert inbox.messages == [ShardGone(0)]
    inbox.end.close()


def test_closing_a_shard_ends_its_thread(context: "zmq.Context[Any]") -> None:
    end = CoordinatorEnd(1, context=context)
    before = threading.active_count()
    shard = ShardEnd(end.address, 0, context=context)
    assert threading.active_count() == before + 1
    shard.close()
    assert threading.active_count() == before
    end.close()
