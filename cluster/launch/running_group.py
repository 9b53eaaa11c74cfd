"""A group on Ray: its processes from their places to their end."""

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions

from actors.actor_process import Node
from actors.config import GroupConfig
from actors.coordinator_actor import CoordinatorActor
from actors.logs import LogSettings
from actors.model_location import to_local, to_portable
from actors.shard_actor import ShardActor
from actors.shard_spec import CollectivesSpec, ShardSpec
from actors.transport.channel_keys import GroupKeys, MemberKeys
from cluster.launch import placement
from cluster.launch.accounts import load_state
from cluster.launch.followers import Followers
from cluster.launch.members import Member
from cluster.launch.processes import Processes
from cluster.launch.ray_session import RaySession
from cluster.launch.spares import Spares
from cluster.launch.supervisor import Supervisor
from cluster.launch.waiting import Progress, answer, wait_for
from cluster.report.kv_report import describe_kv_cache
from kernels_integration.errors import CollectiveError, UnavailableError

logger = logging.getLogger(__name__)

_PROCESS_TIMEOUT_S = 180.0
"""For a process to start: on a joined cluster our packages travel to its node first."""
_CALL_TIMEOUT_S = 60.0
_LOAD_STALL_TIMEOUT_S = 600.0
"""For a shard to read the next tensor."""
_READY_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 3.0
_LEAVE_TIMEOUT_S = 10.0
"""For a shard to leave an epoch that has ended: its peers are gone, which the next collective shows."""
_AGAIN_S = 1.0
_LOST_LEAVE_TIMEOUT_S = 1.0
"""For a shard that was said to be lost, and may live: its connection alone was cut."""


class RunningGroup:
    """What a GroupHandle holds. Placing, opening the coordinator, starting shards: steps of their own."""

    def __init__(
        self,
        session: RaySession,
        config: GroupConfig,
        *,
        logs: LogSettings,
        title: str,
        progress: Progress,
        num_threads: int,
    ) -> None:
        """title: what the names of its members begin with, where there are several groups: "group 1 "."""
        self._title = title
        self.name = f"{config.served_model_name}-{uuid.uuid4().hex[:6]}"
        self.request_address = ""
        self._keys = GroupKeys.draw()
        self.collectives = "solo"
        self.coordinator: Member | None = None
        self.shards: list[Member] = []
        """By rank."""
        self.logs = logs
        self.processes = Processes(self.name)
        self.followers = Followers()
        self._session = session
        self._config = to_portable(config, "cluster")
        self._progress = progress
        self._num_threads = num_threads
        self._step_address = ""
        self._spares = Spares(config.num_spares, spawn=self._spawn_spare, end=self.processes.end)
        self._supervisor: Supervisor | None = None
        self._stop_lock = threading.Lock()
        self._is_stopped = False
        self._is_restarting = False
        self._restarts_from = 0
        """The first epoch of the newest restart."""
        self._restart_failure: str | None = None
        """Why an operator's restart came to nothing."""

    @property
    def config(self) -> GroupConfig:
        """As it is read here; the nodes may have the checkpoint elsewhere."""
        return to_local(self._config)

    @property
    def members(self) -> list[Member]:
        return ([] if self.coordinator is None else [self.coordinator]) + self.shards

    @property
    def request_keys(self) -> MemberKeys:
        """Of the coordinator, and of each that follows it."""
        return self._keys.requests.member

    @property
    def failure(self) -> str | None:
        return self._restart_failure if self._supervisor is None else self._supervisor.failure

    @property
    def session_failure(self) -> str | None:
        return self._session.failure

    @property
    def can_call(self) -> bool:
        """Whether calls of Ray's return."""
        return self._session.can_call

    def end_with_gcs(self, actor: Any) -> None:
        """Let a process on a joined cluster end when Ray's control process does."""
        if (patience_s := self._session.gcs_patience_s) is not None:
            actor.end_with_gcs.remote(patience_s)

    def spawn_all(self, epoch: int = 0) -> None:
        """The coordinator's process and those of the first shards, by bundle."""
        self.processes.spawn(CoordinatorActor, 0, _coordinator_title(epoch), num_threads=1)
        for index in range(self._config.tensor_parallel_size):
            title = f"epoch {epoch} process {index}"
            self.processes.spawn(ShardActor, 1 + index, title, num_threads=self._num_threads)

    def start(self, epoch: int = 0) -> None:
        """From processes to a group that serves."""
        coordinator, *shards = self.processes.running
        self.open_coordinator(coordinator, epoch)
        self.start_shards(shards, epoch)
        self.supervise(epoch)

    def restart(self, progress: Progress, config: GroupConfig | None = None) -> None:
        """As GroupHandle.restart."""
        if self._is_stopped:
            raise UnavailableError("the group is stopping")
        supervisor, self._is_restarting = self._supervisor, True
        epoch = self._restarts_from + 1
        if supervisor is not None:
            supervisor.stop()  # whatever it waits for
            epoch = max(epoch, supervisor.epoch + 1)
        self._supervisor, self._restarts_from = None, epoch
        self._end_runs()
        self._spares.forget()
        self.processes.end_all()
        self._is_restarting, self._progress = False, progress
        if config is not None:
            self._config = to_portable(config, "cluster")
        try:
            self.spawn_all(epoch)
            self.start(epoch)
            self._restart_failure = None
        except BaseException as error:
            self._restart_failure = f"the group did not start again: {error}"
            self.tell_lost(self._restart_failure)
            self.processes.end_all()
            raise

    def open_coordinator(self, actor: Any, epoch: int = 0) -> None:
        """Let it listen for shards and front ends, and work."""
        [node] = self._wait([actor.node.remote()], "the coordinator's process to start", _PROCESS_TIMEOUT_S)
        self._open_coordinator(actor, node, epoch=epoch, recovers="")

    def _open_coordinator(self, actor: Any, node: Node, *, epoch: int, recovers: str) -> None:
        self.coordinator = self._member("coordinator", actor, node, bundle=0, epoch=epoch)
        host = "127.0.0.1" if self._session.is_local else node.ip
        [(self._step_address, self.request_address)] = self._wait(
            [actor.open.remote(self._config, host, epoch, self._keys, recovers)],
            "the coordinator to listen",
            _CALL_TIMEOUT_S,
        )
        self.coordinator.run = actor.run.remote()
        self.followers.moved(self.request_address)

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
            self._member(f"shard {rank}", actors[index], nodes[index], bundle=1 + index, epoch=epoch)
            for rank, index in enumerate(order)
        ]
        self._progress(describe_kv_cache(to_local(self._config)))
        self._progress(f"placed on {placement.count_by_node({m.name: m.node for m in self.members})}")
        self._load(epoch, _LOAD_STALL_TIMEOUT_S)
        self._await_ready()

    def _load(self, epoch: int, timeout_s: float) -> None:
        """Let every shard join an epoch, with the model that it has or is to load, and run."""
        collectives = self._choose_collectives()
        self.collectives = collectives.kind
        for rank, shard in enumerate(self.shards):
            spec = ShardSpec(
                config=self._config,
                tp_rank=rank,
                epoch=epoch,
                step_address=self._step_address,
                step_keys=self._keys.steps.member,
                collectives=collectives,
                node_ip=shard.node.ip,
                num_threads=self._num_threads,
            )
            shard.run = shard.actor.load.remote(spec)
        self._wait(
            [shard.run for shard in self.shards],
            f"{len(self.shards)} shards to load the model",
            timeout_s,
            state=lambda: load_state(self.shards),
        )
        for shard in self.shards:
            shard.run = shard.actor.run.remote()

    def restart_shards(self, epoch: int, lost_rank: int | None = None) -> None:
        """Let the shards join a new epoch; those whose process is gone, or of no use, are started anew.

        lost_rank: of the shard that was said to be lost. Errors: as wait_for.
        """
        runs = [shard.run for shard in self.shards]
        if lost_rank is not None:
            ray.wait([runs[lost_rank]], timeout=_LOST_LEAVE_TIMEOUT_S)
            self._end_unless_idle(self.shards[lost_rank])
        ray.wait(runs, num_returns=len(runs), timeout=_LEAVE_TIMEOUT_S)
        gone = {
            rank: shard.bundle for rank, shard in enumerate(self.shards) if not self._end_unless_idle(shard)
        }
        self._replace_shards(gone, epoch)
        self._load(epoch, self._config.recovery_timeout_s)
        self._refill_spares()

    def _replace_shards(self, gone: Mapping[int, int], epoch: int) -> None:
        """By spares where there are some, else by new processes. gone: bundles by rank."""
        spares = {rank: self._spares.take(ShardActor, self.shards[rank].node) for rank in gone}
        found = {rank: spare for rank, spare in spares.items() if spare is not None}
        missing = {rank: bundle for rank, bundle in gone.items() if rank not in found}
        if missing:
            titles = {bundle: f"epoch {epoch} process {bundle - 1}" for bundle in missing.values()}
            what = f"{len(missing)} of {len(self.shards)} shards' processes to start"
            started = self._start_again(ShardActor, titles, what, num_threads=self._num_threads)
            found |= dict(zip(missing, started, strict=True))
        for rank, (actor, node) in found.items():
            self.shards[rank] = self._member(f"shard {rank}", actor, node, bundle=gone[rank], epoch=epoch)

    def _spawn_spare(self, actor_class: Any, bundle: int, title: str) -> Any:
        """Without a CPU: it takes over the place of one that had it."""
        num_threads = self._num_threads if actor_class is ShardActor else 1
        return self.processes.spawn(actor_class, bundle, title, num_threads=num_threads, num_cpus=0)

    def _refill_spares(self) -> None:
        assert self.coordinator is not None, "it runs"
        by_node = {shard.node.node_id: (ShardActor, shard.bundle, shard.node) for shard in self.shards}
        coordinator = (CoordinatorActor, self.coordinator.bundle, self.coordinator.node)
        self._spares.refill([coordinator, *by_node.values()])

    def _start_again(
        self, actor_class: Any, titles: Mapping[int, str], what: str, *, num_threads: int
    ) -> list[tuple[Any, Node]]:
        """Processes in the places of some that are gone (titles: by bundle), and their nodes.

        Ray may have yet to find out that a node is dead, and refuses what it sends there: then again.
        """
        timeout_s = self._config.recovery_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while True:
            actors = [
                self.processes.spawn(actor_class, bundle, title, num_threads=num_threads)
                for bundle, title in titles.items()
            ]
            try:
                nodes = self._wait(
                    [actor.node.remote() for actor in actors],
                    what,
                    timeout_s,
                    state=lambda: self.processes.missing_room(list(titles)),
                )
            except UnavailableError as error:
                for actor in actors:
                    self.processes.end(actor)
                if self._why_in_vain() is not None or time.monotonic() >= deadline_s:
                    raise
                self._progress(str(error))
                time.sleep(_AGAIN_S)
            else:
                return list(zip(actors, nodes, strict=True))

    def _end_unless_idle(self, shard: Member) -> bool:
        """Whether a shard lives, has left its epoch and can join another; else its process is ended."""
        if ray.wait([shard.run], timeout=0)[0]:
            try:
                ray.get(shard.run)
                return True
            except ray.exceptions.RayTaskError as error:
                # Whose peers or coordinator are gone is as good as ever; of another error nobody knows.
                if isinstance(error.cause, CollectiveError | UnavailableError):
                    return True
            except ray.exceptions.RayError:
                pass
        self.processes.end(shard.actor)
        return False

    def replace_coordinator(self, epoch: int, cause: str) -> None:
        """A new coordinator in the place of one that is gone; then every shard joins it in a new epoch.

        Front ends that follow the group are told its address at once, before the shards have come.
        """
        assert self.coordinator is not None, "there was one"
        self.processes.end(self.coordinator.actor)
        found = self._spares.take(CoordinatorActor, self.coordinator.node)
        if found is None:
            title, what = _coordinator_title(epoch), "the next coordinator's process to start"
            [found] = self._start_again(CoordinatorActor, {0: title}, what, num_threads=1)
        actor, node = found
        self._open_coordinator(actor, node, epoch=epoch, recovers=cause)

    def tell_lost(self, reason: str) -> None:
        """Let front ends know that the group has failed for good."""
        self.followers.lost(reason)

    def end(self, reason: str) -> None:
        """The group has failed for good: tell front ends, end its shards."""
        self.tell_lost(reason)
        for shard in self.shards:  # they may wait in a collective for the one that is gone
            ray.kill(shard.actor)

    def supervise(self, epoch: int = 0) -> None:
        """From now on a process that ends before its time is noticed, and another one started."""
        self._progress = self._tell_recovery
        self._supervisor = Supervisor(
            self,
            session=self._session,
            max_restarts=self._config.max_restarts,
            timeout_s=self._config.recovery_timeout_s,
            epoch=epoch,
        )
        self._refill_spares()

    def _tell_recovery(self, message: str) -> None:
        logger.info("%s: %s", self.name, message)
        if self._supervisor is not None:
            self._supervisor.tell(message)

    def _member(self, name: str, actor: Any, node: Node, *, bundle: int, epoch: int) -> Member:
        name = self._title + name
        log_name = name.replace(" ", "-") + (f"-epoch-{epoch}" if epoch else "")
        member = Member(name, actor, node, bundle, log_name)
        member.ask("start_logging", self.logs, log_name)
        self.end_with_gcs(actor)
        return member

    def log_of(self, member: Member) -> Path | None:
        """Its log file, on its node."""
        return self.logs.folder / f"{member.log_name}.log"

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
            failure=self._why_in_vain,
        )

    def _why_in_vain(self) -> str | None:
        if self._is_stopped or self._is_restarting:
            return "the group is stopping" if self._is_stopped else "the group is being restarted"
        return self._session.failure

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

    def stop(self) -> None:
        with self._stop_lock:
            if self._is_stopped:
                return
            self._is_stopped = True
        try:
            if self._supervisor is not None:
                self._supervisor.stop()
            # A Ray that ends with this group takes all processes with it, and their files: nobody has to wait
            # for one that loads, or is stuck.
            if ray.is_initialized() and self.can_call and not self._session.ends_all:
                self._end_runs()
                self.processes.close()
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


def _coordinator_title(epoch: int) -> str:
    """Names of Ray's actors are unique, those of dead ones too for a while."""
    return f"coordinator of epoch {epoch}" if epoch else "coordinator"
