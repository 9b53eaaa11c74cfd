"""Start a group on Ray, and what its driver may ask of it."""

import atexit
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions

from actors.actor_process import Node
from actors.config import GroupConfig
from actors.logs import LogSettings, check_writable, new_run
from actors.transport.channel_keys import MemberKeys
from cluster.launch import placement
from cluster.launch.accounts import ask_all, take_trace
from cluster.launch.followers import Follower
from cluster.launch.members import create, create_on
from cluster.launch.ray_session import RaySession
from cluster.launch.running_group import RunningGroup
from cluster.launch.waiting import Progress, ticking
from kernels_integration.errors import ConfigError

if TYPE_CHECKING:
    from kernels_integration.spans import Span


def launch_group(
    config: GroupConfig,
    *,
    address: str | None = None,
    progress: Progress = lambda message: None,
    with_gateway: bool = False,
) -> "GroupHandle":
    """Start a coordinator and its shards; returns when tokens can be produced.

    address: as in RaySession. progress: called with what is waited for, about once a second.
    with_gateway: reserve a place for a gateway on this node too; see GroupHandle.start_gateway.
    Errors: ClusterTooSmallError, UnavailableError, and what the shards raise while loading
    (CheckpointError, ConfigError). Nothing is left behind after an error.
    """
    [group] = launch_groups(
        config,
        1,
        address=address,
        progress=progress,
        with_gateway=with_gateway,
    )
    return group


def launch_groups(
    config: GroupConfig,
    num_groups: int,
    *,
    address: str | None = None,
    progress: Progress = lambda message: None,
    with_gateway: bool = False,
) -> "list[GroupHandle]":
    """As `launch_group`, several replicas: placed one after the other, then started side by side.

    with_gateway: the place is in the first one's reservation. Each is stopped by itself.
    """
    if num_groups > 1 and config.device != "cpu":
        raise ConfigError(
            f"num-groups {num_groups} needs --device cpu: groups do not share a machine's GPUs yet; start a "
            "server for each GPU, and a router such as SMG before them"
        )
    if config.log_dir is not None:
        check_writable(config.log_dir)
    logs = LogSettings(run=new_run(), level=config.log_level, format=config.log_format, parent=config.log_dir)
    groups: list[RunningGroup] = []
    try:
        for number in range(num_groups):
            what = "Ray to start" if address in (None, "local") else f"the Ray cluster at {address}"
            with ticking(progress, what):
                session = RaySession(address)
            title = f"group {number} " if num_groups > 1 else ""
            group = RunningGroup(
                session, config, logs=logs, title=title, progress=progress, num_threads=config.num_threads
            )
            groups.append(group)
            # a local Ray is its own: who chose the threads has counted the cores
            cpus_of_shard = 1 if session.is_local else config.num_threads
            bundles = placement.bundles_of(config.tensor_parallel_size, cpus_of_shard)
            if with_gateway and number == 0:
                bundles.append(placement.gateway_bundle(ray.get_runtime_context().get_node_id()))
            group.processes.reserve(bundles, config.placement_timeout_s, progress)
            group.spawn_all()
        if num_groups == 1:
            groups[0].start()
        else:
            _start_side_by_side(groups)
    except BaseException:
        for group in groups:
            group.stop()
        raise
    return [GroupHandle(group) for group in groups]


def _start_side_by_side(groups: Sequence[RunningGroup]) -> None:
    """Errors: of the first that fails; the others still start then, until they are stopped."""
    with ThreadPoolExecutor(len(groups), thread_name_prefix="start") as pool:
        starting = [pool.submit(group.start) for group in groups]
        try:
            for future in as_completed(starting):
                future.result()
        except BaseException:
            for group in groups:
                group.stop()
            raise


class GroupHandle:
    """A running group. Stopped by `stop`, by leaving `with`, or when the driver exits."""

    def __init__(self, group: RunningGroup) -> None:
        self._group = group
        atexit.register(self.stop)

    @property
    def request_address(self) -> str:
        """What GroupClient connects to."""
        return self._group.request_address

    @property
    def request_keys(self) -> MemberKeys:
        """What GroupClient is let in with."""
        return self._group.request_keys

    @property
    def placement(self) -> dict[str, Node]:
        """The node of each actor: "coordinator", "shard 0", ..."""
        return {member.name: member.node for member in self._group.members}

    @property
    def collectives(self) -> str:
        """How the shards talk: solo, shared_memory or gloo."""
        return self._group.collectives

    @property
    def logs(self) -> LogSettings:
        """Where the actors log, each in a file of its name, on their nodes."""
        return self._group.logs

    @property
    def failure(self) -> str | None:
        """Why the group can serve no more; None while it can."""
        return self._group.failure

    @property
    def config(self) -> GroupConfig:
        """What it serves now."""
        return self._group.config

    def restart(self, progress: Progress, config: GroupConfig | None = None) -> None:
        """End every process and start others in their places; followers are told where the group is then.

        It should be drained: what runs there fails. config: what it serves from then on.
        Errors: as launch_group; the group has failed then, and may be restarted again.
        """
        self._group.restart(progress, config)

    def follow(self, follower: Follower) -> None:
        """Tell a front end where the group can be reached from now on, and when it has failed."""
        self._group.followers.append(follower)

    def start_gateway(self, actor_class: Any, *arguments: Any, node_id: str | None, title: str) -> Any:
        """A process in the place that was reserved for it, or on another node, where it takes no CPU.

        A place on a node that is lost could not be had on another, and would keep Ray from giving the group's
        processes new ones: only this node's is part of the reservation.
        """
        name = f"{self._group.name}/{title}"
        if node_id is None:
            room = self._group.processes.room
            last = room.bundle_count - 1
            gateway = create(actor_class, room, last, *arguments, name=name, num_threads=1, num_cpus=0)
        else:
            gateway = create_on(node_id, actor_class, *arguments, name=f"{name} on {node_id[:8]}")
        self._group.end_with_gcs(gateway)
        return gateway

    @property
    def session_failure(self) -> str | None:
        """Which of Ray's own processes has ended before its time; None while all live."""
        return self._group.session_failure

    @property
    def can_call(self) -> bool:
        """Whether calls of Ray's return."""
        return self._group.can_call

    def memory(self) -> dict[str, int]:
        """Resident bytes of each actor that lives."""
        return ask_all(self._group.members, "memory")

    def take_trace(self) -> "dict[str, list[Span]]":
        """By actor: where its time went since the last call, on this process's monotonic clock.

        Actors that died are left out. Empty lists unless config.trace.
        """
        return take_trace(self._group.members)

    def process_ids(self) -> dict[str, int]:
        """The process of each actor that lives, on its node."""
        return ask_all(self._group.members, "ping")

    def stop(self) -> None:
        """End the group within seconds, also after a failure; a second call does nothing."""
        atexit.unregister(self.stop)
        self._group.stop()

    def __enter__(self) -> "GroupHandle":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
