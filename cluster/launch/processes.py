"""The processes of one group, in the room that is reserved for them."""

import contextlib
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, remove_placement_group

from cluster.launch import placement
from cluster.launch.members import create
from cluster.launch.waiting import Progress


class Processes:
    """Ray's actors by the bundle that each has its room in. Handles of Ray's are untyped.

    group: the name that theirs begin with, as the dashboard shows them.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._room: PlacementGroup | None = None
        self._bundles: list[placement.Bundle] = []
        self.running: list[Any] = []
        """Every one that was started and not ended, also those that have yet to answer."""

    @property
    def room(self) -> PlacementGroup:
        assert self._room is not None, "reserve first"
        return self._room

    def reserve(self, bundles: Sequence[placement.Bundle], timeout_s: float, progress: Progress) -> None:
        """Room for everything, or nothing."""
        self._bundles = list(bundles)
        self._room = placement.reserve(bundles, name=self._group, timeout_s=timeout_s, progress=progress)

    def spawn(
        self, actor_class: Any, bundle: int, title: str, *, num_threads: int, num_cpus: float = 1
    ) -> Any:
        """Start one in its bundle; it answers later."""
        name = f"{self._group}/{title}"
        actor = create(actor_class, self.room, bundle, name=name, num_threads=num_threads, num_cpus=num_cpus)
        self.running.append(actor)
        return actor

    def end(self, actor: Any) -> None:
        ray.kill(actor)
        with contextlib.suppress(ValueError):
            self.running.remove(actor)

    def end_all(self) -> None:
        for actor in list(self.running):
            self.end(actor)

    def missing_room(self, places: Sequence[int]) -> str:
        """What the bundles of a lost node wait for, as the end of a message; "" when all have a place."""
        table = ray.util.placement_group_table(self.room)
        if table["state"] == "CREATED":
            return ""
        wanted = [self._bundles[place] for place in places]
        return f": {placement.describe_shortage(wanted, placement.node_capacities())}"

    def close(self) -> None:
        """End all, and give the room back."""
        self.end_all()
        if self._room is not None:
            remove_placement_group(self._room)
