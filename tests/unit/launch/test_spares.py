"""Which spare takes the place of a process that is lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray.exceptions

from actors.actor_process import Node
from cluster.launch import spares as module
from cluster.launch.spares import Spares

HERE, THERE = (Node(node_id=name, ip=name, pid=number) for number, name in enumerate(("here", "there")))


@dataclass
class Process:
    """Of a class, in a bundle; `answer` is what its `warm` gives, None while it starts."""

    actor_class: str
    bundle: int
    title: str
    answer: Node | Exception | None = None
    warm: Any = field(init=False)

    def __post_init__(self) -> None:
        self.warm = SimpleNamespace(remote=lambda: self)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    def wait(calls: Sequence[Process], *, timeout: float) -> tuple[list[Process], list[Process]]:
        return [c for c in calls if c.answer is not None], [c for c in calls if c.answer is None]

    def get(call: Process) -> Node:
        if isinstance(call.answer, Exception):
            raise call.answer
        assert call.answer is not None
        return call.answer

    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=wait, get=get, exceptions=ray.exceptions))
    return []


def spares_in(started: list[Process], ended: list[Process], num: int = 1) -> Spares:
    def spawn(actor_class: str, bundle: int, title: str) -> Process:
        started.append(Process(actor_class, bundle, title))
        return started[-1]

    return Spares(num, spawn=spawn, end=ended.append)


PLACES = [("coordinator", 0, HERE), ("shard", 1, HERE), ("shard", 2, THERE)]


def test_none_are_started_where_none_are_wanted(started: list[Process]) -> None:
    spares = spares_in(started, [], num=0)
    spares.refill(PLACES)
    assert started == []
    assert spares.take("shard", HERE) is None


def test_one_of_the_class_and_the_node_is_taken_once_and_replaced(started: list[Process]) -> None:
    spares = spares_in(started, [])
    spares.refill(PLACES)
    assert [(p.actor_class, p.bundle) for p in started] == [("coordinator", 0), ("shard", 1), ("shard", 2)]
    assert spares.take("shard", THERE) is None, "it has yet to start"
    for process, (_, _, node) in zip(started, PLACES, strict=True):
        process.answer = node
    assert spares.take("shard", THERE) == (started[2], THERE)
    assert spares.take("shard", THERE) is None
    spares.refill(PLACES)
    assert [(p.actor_class, p.bundle) for p in started[3:]] == [("shard", 2)]
    assert len({p.title for p in started}) == 4, "Ray's actors have names of their own"


def test_a_spare_that_is_lost_or_went_elsewhere_is_not_taken(started: list[Process]) -> None:
    ended: list[Process] = []
    spares = spares_in(started, ended, num=2)
    spares.refill([("shard", 1, HERE)])
    started[0].answer, started[1].answer = ray.exceptions.RayActorError(), THERE
    assert spares.take("shard", HERE) is None
    assert ended == [started[0]]
