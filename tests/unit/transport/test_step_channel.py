"""The step channel over loopback: order, epochs, liveness, failures."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from actors.messages import StepOutput
from actors.transport.step_channel import CoordinatorEnd, ShardEnd, ShardFailure
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
        self.messages: list[StepOutput | ShardFailure] = []

    def pump(self) -> bool:
        self.messages += self.end.receive()
        return True

    def wait_ready(self) -> None:
        wait_until(lambda: self.pump() and self.end.is_ready)

    def wait_messages(self, count: int) -> None:
        wait_until(lambda: self.pump() and len(self.messages) >= count)


@pytest.fixture
def group(context: "zmq.Context[Any]") -> Iterator[tuple[Inbox, list[ShardEnd]]]:
    end = CoordinatorEnd(2, epoch=3, silence_s=0.4, context=context)
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
    end.socket.send_multipart((b"2.0.steps", b"\x06" + (1).to_bytes(4, "little") + b"\xff" * 4, b"stale"))
    end.send(step_input(7, epoch=2))
    received = new.receive()
    assert received is not None
    assert received.step == 7
    for shard in (old, new):
        shard.close()
    end.close()


def test_a_shard_inside_a_long_step_beats_and_a_dead_one_falls_silent(
    group: tuple[Inbox, list[ShardEnd]],
) -> None:
    inbox, shards = group
    for shard in shards:
        shard.ready()
    inbox.wait_ready()
    # Neither shard reads its socket now, as in a long step.
    until_s = time.monotonic() + 0.7
    while time.monotonic() < until_s:
        inbox.pump()
        assert inbox.end.silent() == []
        time.sleep(0.02)
    shards[1].close()
    wait_until(lambda: inbox.pump() and inbox.end.silent() == [1])


def test_a_fatal_error_arrives_with_code_and_text(group: tuple[Inbox, list[ShardEnd]]) -> None:
    inbox, shards = group
    shards[1].fail("invalid_checkpoint", "no such tensor")
    inbox.wait_messages(1)
    assert inbox.messages == [ShardFailure(rank=1, code="invalid_checkpoint", text="no such tensor")]


def test_foreign_messages_are_ignored(context: "zmq.Context[Any]") -> None:
    end = CoordinatorEnd(1, context=context)
    stranger = context.socket(zmq.DEALER)
    stranger.connect(end.address)
    stranger.send(b"one frame")
    stranger.send_multipart((b"short", b"x"))
    stranger.send_multipart((b"\x02" + bytes(4) + (9).to_bytes(4, "little"), b""))  # a rank that is none
    shard = ShardEnd(end.address, 0, context=context)
    shard.ready()
    inbox = Inbox(end)
    inbox.wait_ready()
    assert inbox.messages == []
    assert end.num_ready == 1
    shard.close()
    stranger.close()
    end.close()


def test_closing_a_shard_ends_its_thread(context: "zmq.Context[Any]") -> None:
    end = CoordinatorEnd(1, context=context)
    before = threading.active_count()
    shard = ShardEnd(end.address, 0, context=context)
    assert threading.active_count() == before + 1
    shard.close()
    assert threading.active_count() == before
    end.close()
