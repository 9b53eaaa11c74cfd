"""Start a group on Ray and hold it: placement, actors, loading, supervision, stop."""

import atexit
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.actor_process import Node
from actors.config import GroupConfig
from actors.coordinator_actor import CoordinatorActor
from actors.logs import LogSettings, check_writable, new_run
from actors.model_location import to_local, to_portable
from actors.shard_actor import ShardActor
from actors.shard_spec import ShardSpec
from cluster.launch import placement
from cluster.launch.ray_session import RaySession
from cluster.report.kv_report import describe_kv_cache
from cluster.report.load_report import describe_load
from cluster.report.trace import clock_offset_ns, on_one_clock
from kernels_integration.errors import CollectiveError, LatentrayError, UnavailableError

if TYPE_CHECKING:
    from kernels_integration.spans import Span

PLACEMENT_TIMEOUT_S = 30.0
"""How long to wait for room in a cluster (an autoscaler may be adding a node)."""
_STOP_TIMEOUT_S = 3.0
_EPOCH = 0


def launch_group(
    config: GroupConfig,
    *,
    address: str | None = None,
    progress: Callable[[str], None] = lambda message: None,
    num_threads: int = 1,
    placement_timeout_s: float = PLACEMENT_TIMEOUT_S,
) -> "GroupHandle":
    """Start a coordinator and its shards; returns when tokens can be produced.

    address: as in RaySession. progress: called with what is waited for, about once a second.
    num_threads: CPU threads of a shard; more than one pays only with cores of its own.
    Errors: ClusterTooSmallError, UnavailableError, and what the shards raise while loading
    (CheckpointError, ConfigError). Nothing is left behind after an error.
    """
    if config.log_dir is not None:
        check_writable(config.log_dir)
    bundles = placement.bundles_of(config.tensor_parallel_size)
    with _ticking(progress, "Ray to start" if address is None else f"the Ray cluster at {address}"):
        session = RaySession(address)
    group = _Group(session)
    try:
        group.start(config, bundles, progress, num_threads, placement_timeout_s)
    except BaseException:
        group.stop()
        raise
    return GroupHandle(group)


class GroupHandle:
    """A running group. Stopped by `stop`, by leaving `with`, or when the driver exits."""

    def __init__(self, group: "_Group") -> None:
        self._group = group
        atexit.register(self.stop)

    @property
    def request_address(self) -> str:
        """What GroupClient connects to."""
        return self._group.request_address

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
        assert self._group.logs is not None, "it has started"
        return self._group.logs

    @property
    def failure(self) -> str | None:
        """Why the group can serve no more; None while it can."""
        return self._group.failure

    def memory(self) -> dict[str, int]:
        """Resident bytes of each actor that lives."""
        return self._group.ask_all("memory")

    def take_trace(self) -> "dict[str, list[Span]]":
        """By actor: where its time went since the last call, on this process's monotonic clock.

        Actors that died are left out. Empty lists unless config.trace.
        """
        return self._group.take_trace()

    def process_ids(self) -> dict[str, int]:
        """The process of each actor that lives, on its node."""
        return self._group.ask_all("ping")

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


@dataclass(slots=True)
class _Member:
    """An actor of the group. Ray's handles are untyped."""

    name: str
    actor: Any
    node: Node
    run: Any = None
    """The reference of its long `run` call."""

    def ask(self, method: str, *arguments: object, group: str = "control") -> Any:
        """Call a method while `run` runs."""
        return getattr(self.actor, method).options(concurrency_group=group).remote(*arguments)

    def clock_ns(self) -> int:
        now_ns: int = ray.get(self.ask("clock_ns"), timeout=5)
        return now_ns


class _Group:
    """What a GroupHandle holds; its states are: starting, running, failed, stopped."""

    def __init__(self, session: RaySession) -> None:
        self.request_address = ""
        self.collectives = "solo"
        self.failure: str | None = None
        self.members: list[_Member] = []
        self.logs: LogSettings | None = None
        self._session = session
        self._placement_group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._is_stopping = threading.Event()
        self._stop_lock = threading.Lock()
        self._is_stopped = False
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    def start(
        self,
        config: GroupConfig,
        bundles: Sequence[placement.Bundle],
        progress: Callable[[str], None],
        num_threads: int,
        placement_timeout_s: float,
    ) -> None:
        config = to_portable(config, "cluster")
        self._placement_group = placement.reserve(bundles, timeout_s=placement_timeout_s, progress=progress)
        self._actors = [
            _create(CoordinatorActor, self._placement_group, 0, num_threads=1),
            *(
                _create(ShardActor, self._placement_group, 1 + index, num_threads=num_threads)
                for index in range(config.tensor_parallel_size)
            ),
        ]
        coordinator_node, *nodes = _wait(
            [actor.node.remote() for actor in self._actors], f"{len(bundles)} actors to start", progress
        )
        order = placement.rank_order(coordinator_node, nodes)
        coordinator = _Member("coordinator", self._actors[0], coordinator_node)
        shards = [
            _Member(f"shard {rank}", self._actors[1 + index], nodes[index])
            for rank, index in enumerate(order)
        ]
        self.members = [coordinator, *shards]
        self.logs = LogSettings(run=new_run(), level=config.log_level, parent=config.log_dir)
        for member in self.members:
            member.ask("start_logging", self.logs, member.name)
        host = "127.0.0.1" if self._session.is_local else coordinator_node.ip
        [(step_address, self.request_address)] = _wait(
            [coordinator.actor.open.remote(config, host, _EPOCH)], "the coordinator to listen", progress
        )
        coordinator.run = coordinator.actor.run.remote()
        collectives = placement.choose_collectives(
            [shard.node for shard in shards],
            name=f"latentray-{uuid.uuid4().hex[:8]}",
            can_share_memory=lambda: ray.get(shards[0].ask("can_share_memory")),
            free_port=lambda: ray.get(shards[0].ask("free_port")),
        )
        self.collectives = collectives.kind
        progress(describe_kv_cache(to_local(config)))
        progress(f"placed on {placement.count_by_node({m.name: m.node for m in self.members})}")
        loads = [
            shard.actor.load.remote(
                ShardSpec(
                    config=config,
                    tp_rank=rank,
                    epoch=_EPOCH,
                    step_address=step_address,
                    collectives=collectives,
                    node_ip=shard.node.ip,
                    num_threads=num_threads,
                )
            )
            for rank, shard in enumerate(shards)
        ]
        _wait(loads, lambda: f"{len(shards)} shards to load the model{self._load_state()}", progress)
        for shard in shards:
            shard.run = shard.actor.run.remote()
        self._await_ready(coordinator, len(shards))
        self._supervisor.start()

    def _load_state(self) -> str:
        """What the shards have read, as the end of a message; "" while one does not answer."""
        asked = [member.ask("load_progress") for member in self.members[1:]]
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
        self._is_stopping.set()
        if self._supervisor.is_alive():
            self._supervisor.join()
        if ray.is_initialized():
            self._end_runs()
            for actor in self._actors:
                ray.kill(actor)
            if self._placement_group is not None:
                remove_placement_group(self._placement_group)
        self._session.close()

    def _end_runs(self) -> None:
        """Let the actors end by themselves, so that sockets and shared memory are given back."""
        runs = [member.run for member in self.members if member.run is not None]
        if runs:
            self.members[0].ask("stop")
            ray.wait(runs, num_returns=len(runs), timeout=_STOP_TIMEOUT_S)

    def _await_ready(self, coordinator: _Member, num_shards: int) -> None:
        """The shards' READY messages are under way when `load` has returned."""
        deadline_s = time.monotonic() + 10
        while ray.get(coordinator.ask("num_ready_shards")) < num_shards:
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"the shards cannot reach the coordinator at {self.request_address}; "
                    "check that the nodes may open TCP connections to each other"
                )
            time.sleep(0.01)

    def _supervise(self) -> None:
        """Notice an actor that ends before its time, tell the coordinator, end the other shards.

        They would wait in a collective for the one that is gone. Ray reports a killed process within
        milliseconds; a node that falls silent is found earlier by the coordinator's heartbeats.
        """
        coordinator, *shards = self.members
        failed = coordinator.ask("wait_failed", group="watch")
        runs = {member.run: rank - 1 for rank, member in enumerate(self.members)}
        while not self._is_stopping.is_set():
            done, _ = ray.wait([failed, *runs], timeout=0.2)
            if not done or self._is_stopping.is_set():
                continue
            reference = done[0]
            if reference == failed:
                self.failure = _failure_text(failed) or "the coordinator was stopped"
            else:
                rank, text = runs[reference], _failure_text(reference) or "it ended"
                self.failure = f"{self.members[rank + 1].name} is lost: {text}"
                if rank >= 0:
                    coordinator.ask("shard_lost", rank, text)
            for shard in shards:
                ray.kill(shard.actor)
            return


def _create(actor_class: Any, group: PlacementGroup, bundle: int, *, num_threads: int) -> Any:
    return actor_class.options(
        num_cpus=1,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        # Ray hides GPUs from actors that reserve none; a shard takes the machine's own.
        runtime_env={
            "env_vars": {
                "OMP_NUM_THREADS": str(num_threads),
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            }
        },
    ).remote()


@contextmanager
def _ticking(progress: Callable[[str], None], what: str) -> Iterator[None]:
    """Report progress once a second while a call that cannot report blocks this thread."""
    done, start_s = threading.Event(), time.monotonic()

    def tick() -> None:
        while not done.wait(1):
            progress(f"waiting for {what} ({time.monotonic() - start_s:.0f} s)")

    progress(f"waiting for {what} (0 s)")
    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()


def _wait(
    references: Sequence[Any], what: str | Callable[[], str], progress: Callable[[str], None]
) -> list[Any]:
    """The results, in order; the first failure is raised as the error that it is."""
    start_s = time.monotonic()
    pending = list(references)
    while pending:
        text = what if isinstance(what, str) else what()
        progress(f"waiting for {text} ({time.monotonic() - start_s:.0f} s)")
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=1)
        failures = [error for reference in done if (error := _error_of(reference, text)) is not None]
        if failures:  # where one rank fails, its peers fail in their collectives
            raise min(failures, key=lambda error: isinstance(error, CollectiveError))
    return [ray.get(reference) for reference in references]


def _error_of(reference: Any, what: str) -> Exception | None:
    """The failure of a call that is done, as our own error where it is one."""
    try:
        ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return error.cause if isinstance(error.cause, LatentrayError) else error
    except ray.exceptions.RayError as error:
        return UnavailableError(f"while waiting for {what}: {error}")
    return None


def _failure_text(reference: Any) -> str | None:
    """Why a call ended, in one line; what it returned if it did not fail."""
    try:
        result: str | None = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return f"{type(error.cause).__name__}: {error.cause}" if error.cause else str(error)
    except ray.exceptions.ActorDiedError:
        return "its process died"
    except ray.exceptions.RayError as error:
        return str(error).splitlines()[0]
    return result
