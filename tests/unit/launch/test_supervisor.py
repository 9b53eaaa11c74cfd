"""What the supervisor does when members end, with calls of Ray's that a test answers."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from actors.actor_process import Node
from actors.coordinator.group_state import GroupState, Phase
from cluster.launch import supervisor as module
from cluster.launch.members import Member
from cluster.launch.supervisor import Supervisor
from kernels_integration.errors import UnavailableError

DEAD = ray.exceptions.RayActorError()


class Call:
    """A reference: its result is there once it is set."""

    def __init__(self) -> None:
        self.is_done = False
        self.result: Any = None

    def end(self, result: Any = None) -> None:
        self.result, self.is_done = result, True


def wait(calls: Sequence[Call], *, num_returns: int = 1, timeout: float) -> tuple[list[Call], list[Call]]:
    assert calls, "Ray refuses to wait for nothing"
    deadline_s = time.monotonic() + timeout
    while time.monotonic() < deadline_s and sum(call.is_done for call in calls) < num_returns:
        time.sleep(0.001)
    done = [call for call in calls if call.is_done][:num_returns]
    return done, [call for call in calls if call not in done]


def get(call: Call) -> Any:
    if isinstance(call.result, Exception):
        raise call.result
    return call.result


class FakeMember(Member):
    """Its calls are noted, and answered by the test."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None, Node(node_id="n", ip="10.0.0.1", pid=7), run=Call())
        self.asked: list[tuple[Any, ...]] = []
        self.changes: list[Call] = []

    def ask(self, method: str, *arguments: object, group: str = "control") -> Any:
        call = Call()
        if method == "wait_change":
            self.changes.append(call)
        self.asked.append((method, *arguments))
        return call


class FakeGroup:
    """One that starts again what it is told to; `errors` are raised by the next starts."""

    def __init__(self) -> None:
        self.members = [FakeMember(name) for name in ("coordinator", "shard 0", "shard 1")]
        self.done: list[tuple[Any, ...]] = []
        self.errors: list[Exception] = []

    @property
    def coordinator(self) -> FakeMember:
        return self.members[0]

    def log_of(self, member: Member) -> None:
        return None

    def restart_shards(self, epoch: int, lost_rank: int | None = None) -> None:
        self.done.append(("restart", epoch, lost_rank))
        if self.errors:
            raise self.errors.pop(0)
        for shard in self.members[1:]:
            shard.run = Call()

    def replace_coordinator(self, epoch: int, cause: str) -> None:
        self.done.append(("replace", epoch, cause))
        if self.errors:
            raise self.errors.pop(0)
        self.members[0] = FakeMember("coordinator")

    def tell_lost(self, reason: str) -> None:
        self.done.append(("tell", reason))

    def end(self, reason: str) -> None:
        self.done.append(("end", reason))


Start = Callable[..., Supervisor]


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup()


@pytest.fixture
def supervise(group: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    fake = SimpleNamespace(wait=wait, get=get, exceptions=ray.exceptions)
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(module, "cause_of_death", lambda error, member, log: "it was killed")
    monkeypatch.setattr(module, "back_off_s", lambda num: 0.0)
    started: list[Supervisor] = []

    def start(*, max_restarts: int = 2, timeout_s: float = 60.0) -> Supervisor:
        session: Any = SimpleNamespace(failure=None)
        started.append(Supervisor(group, session=session, max_restarts=max_restarts, timeout_s=timeout_s))
        eventually(lambda: bool(group.coordinator.changes))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.stop()
    assert not any(thread.name == "supervisor" for thread in threading.enumerate())


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def recovering(epoch: int, lost_rank: int | None = None) -> GroupState:
    return GroupState(
        num_shards=2, phase=Phase.RECOVERING, epoch=epoch, lost_rank=lost_rank, cause="shard 1 is lost"
    )


def test_a_lost_shard_is_told_and_started_again_when_the_coordinator_asks(
    group: FakeGroup, supervise: Start
) -> None:
    supervisor = supervise()
    group.members[2].run.end(DEAD)
    eventually(lambda: ("shard_lost", 1, "it was killed", 0) in group.coordinator.asked)
    assert not group.done, "the coordinator decides"
    group.coordinator.changes[0].end(recovering(1, 1))
    eventually(lambda: ("wait_change", 1) in group.coordinator.asked)
    assert group.done == [("restart", 1, 1)]
    assert supervisor.failure is None


def test_an_epoch_that_cannot_begin_is_told_as_lost_and_at_the_deadline_as_the_last(
    group: FakeGroup, supervise: Start
) -> None:
    supervise()
    group.errors = [UnavailableError("a process died")]
    group.coordinator.changes[0].end(recovering(1))
    text = "the shards could not be started again: a process died"
    eventually(lambda: ("shard_lost", -1, text, 1) in group.coordinator.asked)
    eventually(lambda: len(group.coordinator.changes) == 2)
    group.coordinator.changes[1].end(recovering(2))
    eventually(lambda: group.done == [("restart", 1, None), ("restart", 2, None)])


def test_a_start_that_waits_past_the_deadline_is_the_last(group: FakeGroup, supervise: Start) -> None:
    supervise(timeout_s=-1.0)
    group.errors = [UnavailableError("no room")]
    group.coordinator.changes[0].end(recovering(1))
    told = "shard 1 is lost; the shards could not be started again: no room"
    eventually(lambda: ("give_up", told) in group.coordinator.asked)


def test_a_lost_coordinator_is_replaced_and_all_shards_join_it(group: FakeGroup, supervise: Start) -> None:
    supervisor = supervise()
    group.coordinator.run.end(DEAD)
    eventually(lambda: ("wait_change", 1) in group.coordinator.asked)
    text = "coordinator on node 10.0.0.1 (process 7) is lost: it was killed"
    assert group.done == [("replace", 1, text), ("restart", 1, None)]
    assert supervisor.failure is None


def test_coordinators_that_die_as_they_start_are_tried_again_until_the_limit(
    group: FakeGroup, supervise: Start
) -> None:
    supervisor = supervise(max_restarts=3)
    group.errors = [UnavailableError(f"try {number}") for number in range(9)]
    group.coordinator.run.end(DEAD)
    eventually(lambda: supervisor.failure is not None)
    assert [epoch for what, epoch, *_ in group.done if what == "replace"] == [1, 2, 3]
    assert group.done[-1] == ("end", supervisor.failure)
    assert "is lost: it was killed; the next one could not be started: try 0" in str(supervisor.failure)


def test_without_restarts_a_lost_coordinator_is_the_end(group: FakeGroup, supervise: Start) -> None:
    supervisor = supervise(max_restarts=0)
    group.coordinator.run.end(DEAD)
    eventually(lambda: supervisor.failure is not None)
    assert group.done == [("end", "coordinator on node 10.0.0.1 (process 7) is lost: it was killed")]


def test_a_failed_group_is_told_with_the_best_account(group: FakeGroup, supervise: Start) -> None:
    supervisor = supervise()
    group.members[1].run.end(DEAD)
    failed = GroupState(num_shards=2).failed("shard 0 is lost: its connection was closed")
    group.coordinator.changes[0].end(failed)
    eventually(lambda: supervisor.failure is not None)
    assert supervisor.failure == "shard 0 on node 10.0.0.1 (process 7) is lost: it was killed"
    assert group.done == [("end", supervisor.failure)]
