"""The actors of a group as the driver holds them."""

from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from actors.actor_process import Node


@dataclass(slots=True)
class Member:
    """An actor of the group. Ray's handles are untyped."""

    name: str
    """coordinator, shard 0, shard 1, ..."""
    actor: Any
    node: Node
    bundle: int = 0
    """Its place in the placement group."""
    log_name: str = ""
    """Of its log file; a process that follows on another has a file of its own."""
    run: Any = None
    """The reference of its newest long call: `load`, then `run`."""

    def __str__(self) -> str:
        return f"{self.name} on node {self.node.ip} (process {self.node.pid})"

    def ask(self, method: str, *arguments: object, group: str = "control") -> Any:
        """Call a method while `run` runs."""
        return getattr(self.actor, method).options(concurrency_group=group).remote(*arguments)

    def clock_ns(self) -> int:
        now_ns: int = ray.get(self.ask("clock_ns"), timeout=5)
        return now_ns


def create(
    actor_class: Any,
    group: PlacementGroup,
    bundle: int,
    *arguments: Any,
    name: str,
    num_threads: int,
    num_cpus: float = 1,
) -> Any:
    """Start an actor in its bundle, under a name that `ray list actors` and the dashboard show."""
    return actor_class.options(
        name=name,
        num_cpus=num_cpus,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        # Ray hides GPUs from actors that reserve none; a shard takes the machine's own.
        runtime_env={
            "env_vars": {
                "OMP_NUM_THREADS": str(num_threads),
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            }
        },
    ).remote(*arguments)


def create_on(node_id: str, actor_class: Any, *arguments: Any, name: str) -> Any:
    """Start an actor that takes no CPU of the account, on a node and nowhere else."""
    return actor_class.options(
        name=name,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
    ).remote(*arguments)
