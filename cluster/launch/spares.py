"""Processes that have started and imported what they will need, for when another one is lost."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import ray
import ray.exceptions

from actors.actor_process import Node

logger = logging.getLogger(__name__)
Spawn = Callable[[Any, int, str], Any]
"""Start an actor of a class in a bundle, under a title, without a CPU of its own."""


class Spares:
    """Of one group. A spare serves in the place of any process of its class on its node.

    spawn: starts one. num: how many are kept of each class on each node. end: of one that is of no use.
    """

    def __init__(self, num: int, *, spawn: Spawn, end: Callable[[Any], None]) -> None:
        self._num = num
        self._spawn = spawn
        self._end = end
        self._waiting: list[tuple[Any, Any, Any, Node]] = []
        """Class, actor, its `warm` call, where it should be."""
        self._numbers = itertools.count()

    def refill(self, places: Sequence[tuple[Any, int, Node]]) -> None:
        """Start those that are missing; nobody waits for them.

        places: class, bundle and node of what may be lost.
        """
        if not self._num:
            return
        for actor_class, bundle, node in places:
            have = sum(cls is actor_class and at.node_id == node.node_id for cls, _, _, at in self._waiting)
            for _ in range(self._num - have):
                actor = self._spawn(actor_class, bundle, f"spare {next(self._numbers)}")
                self._waiting.append((actor_class, actor, actor.warm.remote(), node))

    def take(self, actor_class: Any, node: Node) -> tuple[Any, Node] | None:
        """A spare of a class on a node, and where it runs; None: none is ready there."""
        for spare in list(self._waiting):
            cls, actor, warm, _ = spare
            if cls is not actor_class or not ray.wait([warm], timeout=0)[0]:
                continue
            try:
                found: Node = ray.get(warm)
            except ray.exceptions.RayError as error:
                logger.warning("a spare process is lost: %s", next(iter(str(error).splitlines()), ""))
                self._waiting.remove(spare)
                self._end(actor)
                continue
            if found.node_id == node.node_id:
                self._waiting.remove(spare)
                return actor, found
        return None

    def forget(self) -> None:
        """All have ended, or will."""
        self._waiting.clear()
