"""A group on Ray: its processes from their places to their end."""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, remove_placement_group

from actors.actor_process import Node
from actors.config import GroupConfig
from actors.logs import LogSettings, new_run
from actors.model_location import to_local, to_portable
from actors.shard_actor import ShardActor
from actors.shard_spec import CollectivesSpec, ShardSpec
from cluster.launch import placement
from cluster.launch.members import Member, create
from cluster.launch.ray_session import RaySession
from cluster.launch.supervisor import Supervisor
from cluster.launch.waiting import Progress, answer, wait_for
from cluster.report.kv_report import describe_kv_cache
from cluster.report.load_report import describe_load
from cluster.report.trace import clock_offset_ns, on_one_clock
from kernels_integration.errors import UnavailableError

if TYPE_CHECKING:
    from kernels_integration.spans import Span

_PROCESS_TIMEOUT_S = 180.0
"""For a process to start: on a joined cluster our packages travel to its node first."""
_CALL_TIMEOUT_S = 60.0
_LOAD_STALL_TIMEOUT_S = 600.0
"""For a shard to read the next tensor."""
_READY_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0


class RunningGroup:
    """What a GroupHandle holds. Placing, opening the coordinator, starting shards: steps of their own."""

    def __init__(
        self, session: RaySession, config: GroupConfig, *, progress: Progress, num_threads: int
    ) -> None:
        self.name = f"{config.served_model_name}-{uuid.uuid4().hex[:6]}"
        self.request_address = ""
        self.collectives = "solo"
        self.coordinator: Member | None = None
        self.shards: list[Member] = []
        """By rank."""
        self.logs = LogSettings(run=new_run(), level=config.log_level, parent=config.log_dir)
        self.placement_group: PlacementGroup | None = None
        self._session = session
        self._config = to_portable(config, "cluster")
        self._progress = progress
        self._num_threads = num_threads
        self._step_address = ""
        self._actors: list[Any] = []
        """Every process that was started and not ended, also those that have yet to answer."""
        self._supervisor: Supervisor | None = None
        self._stop_lock = threading.Lock()
        self._is_stopped = False

    @property
    def members(self) -> list[Member]:
        return ([] if self.coordinator is None else [self.coordinator]) + self.shards

    @property
    def failure(self) -> str | None:
        return None if self._supervisor is None else self._supervisor.failure

    @property
    def session_failure(self) -> str | None:
        return self._session.failure

    def place(self, bundles: Sequence[placement.Bundle], timeout_s: float) -> None:
        """Reserve room for everything, or nothing."""
        self.placement_group = placement.reserve(
            bundles, name=self.name, timeout_s=timeout_s, progress=self._progress
        )

    def spawn(self, actor_class: Any, bundle: int, title: str, *, num_threads: int) -> Any:
        """Start a process in its bundle; it answers later."""
        assert self.placement_group is not None, "place first"
        name = f"{self.name}/{title}"
        actor = create(actor_class, self.placement_group, bundle, name=name, num_threads=num_threads)
        self._actors.append(actor)
        return actor

    def spawn_shards(self, epoch: int) -> list[Any]:
        """The processes of an epoch's shards, by bundle; their ranks follow from their nodes."""
        return [
            self.spawn(ShardActor, 1 + index, f"epoch {epoch} process {index}", num_threads=self._num_threads)
            for index in range(self._config.tensor_parallel_size)
        ]

    def open_coordinator(self, actor: Any) -> None:
        """Let it listen for shards and front ends, and work."""
        [node] = self._wait([actor.node.remote()], "the coordinator's process to start", _PROCESS_TIMEOUT_S)
        self.coordinator = self._member("coordinator", actor, node)
        host = "127.0.0.1" if self._session.is_local else node.ip
        [(self._step_address, self.request_address)] = self._wait(
            [actor.open.remote(self._config, host, 0)], "the coordinator to listen", _CALL_TIMEOUT_S
        )
        self.coordinator.run = actor.run.remote()

    def start_shards(self, actors: Sequence[Any], epoch: int) -> None:
        """Make these processes an epoch's shards: ranks, collectives, the model; then they run steps."""
        nodes = self._wait(
            [actor.node.remote() for actor in actors],
            f"{len(actors)} shards' processes to start",
            _PROCESS_TIMEOUT_S,
        )
        assert self.coordinator is not None, "open the coordinator first"
        order = placement.rank_order(self.coordinator.node, nodes)
        self.shards = [
            self._member(f"shard {rank}", actors[index], nodes[index]) for rank, index in enumerate(order)
        ]
        collectives = self._choose_collectives()
        self.collectives = collectives.kind
        self._progress(describe_kv_cache(to_local(self._config)))
        self._progress(f"placed on {placement.count_by_node({m.name: m.node for m in self.members})}")
        loads = [
            shard.actor.load.remote(
                ShardSpec(
                    config=self._config,
                    tp_rank=rank,
                    epoch=epoch,
                    step_address=self._step_address,
                    collectives=collectives,
                    node_ip=shard.node.ip,
                    num_threads=self._num_threads,
                )
            )
            for rank, shard in enumerate(self.shards)
        ]
        self._wait(
            loads, f"{len(loads)} shards to load the model", _LOAD_STALL_TIMEOUT_S, state=self._load_state
        )
        for shard in self.shards:
            shard.run = shard.actor.run.remote()
        self._await_ready()

    def supervise(self) -> None:
        """From now on a process that ends before its time is noticed."""
        self._supervisor = Supervisor(self.members, log_of=self._log_of, session=self._session)

    def _member(self, name: str, actor: Any, node: Node) -> Member:
        member = Member(name, actor, node)
        member.ask("start_logging", self.logs, name)
        return member

    def _log_of(self, member: Member) -> Path | None:
        return self.logs.folder / f"{member.name.replace(' ', '-')}.log"

    def _wait(
        self,
        references: Sequence[Any],
        what: str,
        timeout_s: float,
        state: Callable[[], str] = lambda: "",
    ) -> list[Any]:
        return wait_for(
            references,
            what,
            self._progress,
            timeout_s=timeout_s,
            state=state,
            failure=lambda: self._session.failure,
        )

    def _choose_collectives(self) -> CollectivesSpec:
        first = self.shards[0]

        def ask(method: str) -> Any:
            return answer(first.ask(method), f"{first} to say {method}", timeout_s=_CALL_TIMEOUT_S)

        return placement.choose_collectives(
            [shard.node for shard in self.shards],
            name=f"{self._session.name}-{uuid.uuid4().hex[:8]}",
            can_share_memory=lambda: bool(ask("can_share_memory")),
            free_port=lambda: int(ask("free_port")),
        )

    def _load_state(self) -> str:
        """What the shards have read, as the end of a message; "" while one does not answer."""
        asked = [shard.ask("load_progress") for shard in self.shards]
        try:
            told = describe_load(ray.get(asked, timeout=1))
        except ray.exceptions.RayError:
            return ""
        return f": {told}" if told else ""

    def ask_all(self, method: str) -> dict[str, int]:
        """The answers of the actors that live, by name."""
        answers: dict[str, int] = {}
        for name, reference in [(member.name, member.ask(method)) for member in self.members]:
            try:
                answers[name] = ray.get(reference, timeout=5)
            except ray.exceptions.RayError:
                continue  # the actor is dead or its node is gone
        return answers

    def take_trace(self) -> "dict[str, list[Span]]":
        here = ray.get_runtime_context().get_node_id()
        offsets_ns = {here: 0}
        trace = {}
        for member in self.members:
            node_id = member.node.node_id
            try:
                if node_id not in offsets_ns:
                    offsets_ns[node_id] = clock_offset_ns(member.clock_ns)
                spans = ray.get(member.ask("take_spans"), timeout=30)
            except ray.exceptions.RayError:
                continue  # the actor is dead or its node is gone
            trace[member.name] = on_one_clock(spans, offsets_ns[node_id])
        return trace

    def stop(self) -> None:
        with self._stop_lock:
            if self._is_stopped:
                return
            self._is_stopped = True
        if self._supervisor is not None:
            self._supervisor.stop()
        try:
            # Without its control process or raylet, Ray's calls do not return.
            if ray.is_initialized() and self._session.failure is None:
                self._end_runs()
                for actor in self._actors:
                    ray.kill(actor)
                if self.placement_group is not None:
                    remove_placement_group(self.placement_group)
        finally:
            self._session.close()

    def _end_runs(self) -> None:
        """Let the actors end by themselves, so that sockets and shared memory are given back."""
        runs = [member.run for member in self.members if member.run is not None]
        if runs:
            self.members[0].ask("stop")
            ray.wait(runs, num_returns=len(runs), timeout=_STOP_TIMEOUT_S)

    def _await_ready(self) -> None:
        """The shards' READY messages are under way when `load` has returned."""
        coordinator, num_shards = self.coordinator, len(self.shards)
        assert coordinator is not None, "open the coordinator first"
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        num_ready = 0
        while num_ready < num_shards:
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"{num_shards - num_ready} of {num_shards} shards cannot reach the coordinator at "
                    f"{self._step_address} of node {coordinator.node.ip}; check that the nodes may open TCP "
                    "connections to each other"
                )
            num_ready = answer(
                coordinator.ask("num_ready_shards"), "the coordinator", timeout_s=_CALL_TIMEOUT_S
            )
            time.sleep(0.01)
