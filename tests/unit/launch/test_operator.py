"""Orders on groups and gateways that are scripted: what is told to whom, in which order."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from actors.actor_process import Node
from cluster.control import operator as module
from cluster.control.command import Command
from cluster.control.operator import Operator
from kernels_integration.errors import CheckpointError, ConfigError, UnavailableError


class Gateway:
    """Notes calls; `answers` by method. What is asked for its next order never comes."""

    def __init__(self, told: list[Any]) -> None:
        self.answers: dict[str, Any] = {"num_sequences": 0, "is_healthy": True}
        self.told = told

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> Any:
            if method not in ("next_command", "num_sequences", "is_healthy"):
                self.told.append((method, *arguments))
            return SimpleNamespace(method=method, answer=self.answers.get(method))

        return SimpleNamespace(remote=remote)


class FakeGroup:
    def __init__(self, number: int, told: list[Any]) -> None:
        self.number, self.told = number, told
        self.failure: str | None = None
        self.session_failure = None
        self.config = "old"
        self.broken: tuple[str | None, ...] = ()
        self.placement = {"coordinator": Node(node_id=f"id-{number}", ip=f"10.0.0.{number}")}

    def restart(self, progress: Callable[[str], None], config: str | None = None) -> None:
        self.told.append(("restart", self.number, config))
        if config in self.broken:
            raise CheckpointError("no weights")
        self.config = config or self.config


class World:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.gateway = Gateway(self.told)
        self.groups = [FakeGroup(number, self.told) for number in range(2)]
        self.operator = Operator(self.groups, reload=lambda path: path)  # type: ignore[arg-type,return-value]
        self.operator.joined(self.gateway)
        self.told.clear()

    def do(self, **order: Any) -> list[str]:
        said: list[str] = []
        self.operator.carry_out(Command(**order), said.append)
        return said


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    def get(calls: Any, timeout: float = 0) -> Any:
        return [c.answer for c in calls] if isinstance(calls, list) else calls.answer

    def wait(calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        threading.Event().wait(timeout)
        return [], calls

    fake = SimpleNamespace(get=get, wait=wait, exceptions=ray.exceptions)
    monkeypatch.setattr(module, "ray", fake)
    world = World()
    yield world
    world.operator.stop()


def test_a_group_is_closed_before_it_is_emptied_and_opened_after_its_restart(world: World) -> None:
    assert world.do(do="restart") == ["group 0: serving", "group 1: serving"]
    for number, told in enumerate((world.told[:4], world.told[4:])):
        assert told == [
            ("drain_group", number, "it is being restarted", True),
            ("let_go", number, f"group {number} is drained"),
            ("restart", number, None),
            ("undrain_group", number),
        ]


def test_a_drained_group_stays_drained_over_a_restart(world: World) -> None:
    world.do(do="drain", where="1")
    closed = world.told[0]
    world.told.clear()
    assert world.do(do="restart", where="10.0.0.1") == ["group 1: ready, and drained as before"]
    assert world.told[-1] == closed, "for the operator's reason, and nobody waits for it"
    assert ("undrain_group", 1) not in world.told
    world.do(do="undrain", where="1")
    assert world.told[-1] == ("undrain_group", 1)


def test_streams_move_only_to_groups_that_take_them_and_have_their_weights(world: World) -> None:
    world.do(do="restart", model="new")
    moved = [told[1] for told in world.told if told[0] == "let_go"]
    assert moved == [0], "of the last group with the old weights they end there"
    weights = [told for told in world.told if told[0] == "set_weights"]
    assert weights == [("set_weights", 0, 1), ("set_weights", 1, 1)]
    world.told.clear()
    world.do(do="drain", where="0")
    world.do(do="drain", where="1")
    assert [told[1] for told in world.told if told[0] == "let_go"] == [0]


def test_a_group_that_does_not_start_goes_back_and_those_after_it_are_left(world: World) -> None:
    world.groups[0].broken = ("new",)
    with pytest.raises(CheckpointError, match="no weights"):
        world.do(do="restart", model="new")
    assert [told for told in world.told if told[0] == "restart"] == [
        ("restart", 0, "new"),
        ("restart", 0, "old"),
    ]
    assert [told for told in world.told if told[0] == "set_weights"][-1] == ("set_weights", 0, 0)
    assert world.told[-1] == ("undrain_group", 0)


def test_what_does_not_end_in_time_is_let_go(world: World) -> None:
    world.groups[1].failure = "it is lost"
    left = iter([3, 3, 0])
    call = SimpleNamespace(remote=lambda number: SimpleNamespace(answer=next(left)))
    vars(world.gateway)["num_sequences"] = call
    world.do(do="drain", where="0", drain_s=0)
    [let_go, *_] = [told for told in world.told if told[0] == "let_go"]
    assert "its 0 s for that are over; ask again" in let_go[2]


@pytest.mark.parametrize(("where", "told"), [("2", "numbers 0 to 1"), ("10.9.9.9", "10.0.0.0, 10.0.0.1")])
def test_what_is_not_there_is_refused_with_what_is(world: World, where: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        world.do(do="drain", where=where)
    assert world.told == []


def test_one_order_at_a_time(world: World) -> None:
    world.operator._busy.acquire()
    with pytest.raises(UnavailableError, match="another order"):
        world.do(do="drain", where="0")
    world.operator._busy.release()
