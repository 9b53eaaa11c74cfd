"""The gateways of a deployment: all equal, each on a node of its own, started again where one dies."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.exceptions

from actors.actor_process import Node
from actors.coordinator.group_state import STEADY_S, back_off_s
from cluster.launch.deaths import cause_of_death
from cluster.launch.group import GroupHandle
from cluster.launch.members import Member
from cluster.launch.placement import by_node
from cluster.launch.waiting import Progress, error_of, wait_for
from kernels_integration.errors import ConfigError, LatentrayError

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_NODES_LOOK_S = 2.0
"""The cluster is asked for its nodes this often."""
_AVOID_S = 30.0
_START_TIMEOUT_S = 120.0
_STOP_MARGIN_S = 10.0
"""What a gateway may take beyond its drain before it is killed."""


@dataclass(frozen=True, slots=True)
class Ports:
    """A gateway's. 0: a free one, None: not served."""

    grpc: int
    http: int | None
    metrics: int | None


class Spawn(Protocol):
    """Starts the process of a gateway, which answers later."""

    def __call__(self, node_id: str | None, title: str, ports: Ports) -> Any:
        """node_id: None: where the reservation has a place for it."""


def chosen_nodes(wanted: int | None, here: str, alive: Mapping[str, str], taken: Sequence[str]) -> list[str]:
    """Ids of nodes that should get a gateway now, this node first, then by address.

    wanted: how many there should be; None: one on each node. alive: addresses by id. taken: nodes that have
    one, dead ones too.
    """
    has_one = [node for node in taken if node in alive]
    free = sorted(alive.keys() - set(taken), key=lambda node: (node != here, _as_numbers(alive[node])))
    return free if wanted is None else free[: max(wanted - len(has_one), 0)]


def _as_numbers(ip: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (0, part) for part in ip.split("."))


class Gateway:
    """One place for a gateway, and the process that is there now."""

    def __init__(self, node_id: str | None, ports: Ports) -> None:
        self.node_id = node_id
        """None: this node, in the reservation."""
        self.ports = ports
        """Those that it was given, or found, so that its successor is where clients look for it."""
        self.address = ""
        """host:port that it listens on."""
        self.reached_at = ""
        """The same, with its node's address for that of all interfaces."""
        self.log_folder: Path | None = None
        self.member: Member | None = None
        self.actor: Any = None
        self.lost: Any = None
        """A call that ends with the process."""
        self.num_starts = 0
        self.num_lost = 0
        """In a row."""
        self.since_s = 0.0
        self.failure: str | None = None
        """Why nobody will be there again."""

    @property
    def is_alive(self) -> bool:
        return self.lost is not None and not ray.wait([self.lost], timeout=0)[0]

    @property
    def log_name(self) -> str:
        return "gateway" if self.num_starts <= 1 else f"gateway-{self.num_starts}"


class GatewayFleet:
    """Gateways from `start` to `stop`. Each connects to all groups; requests may come by any of them.

    wanted: how many, None: one on every node, also those that come later. host: what they listen on.
    max_restarts: times that one may die without a minute between; then its place is given up.
    """

    def __init__(
        self,
        groups: Sequence[GroupHandle],
        spawn: Spawn,
        *,
        wanted: int | None,
        host: str,
        ports: Ports,
        max_restarts: int,
    ) -> None:
        self._groups = tuple(groups)
        self._spawn = spawn
        self._wanted = wanted
        self._host = host
        self._ports = ports
        self._max_restarts = max_restarts
        self._here: str = ray.get_runtime_context().get_node_id()
        self._lock = threading.RLock()
        self.gateways: list[Gateway] = []
        """The first one is this node's."""
        self._starting: Gateway | None = None
        """The newest that was started: it may be none of the others yet."""
        self._lost_groups: dict[int, str] = {}
        self._joined: Callable[[Any], None] = lambda actor: None
        self._avoid_until_s: dict[str, float] = {}
        """Nodes on which a gateway did not start."""
        self._is_stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    def start(self, progress: Progress) -> None:
        """Errors: ConfigError for more gateways than nodes, or what one of them says; UnavailableError."""
        for number, group in enumerate(self._groups):
            group.follow(_Follower(self, number))
        first = Gateway(None, self._ports)
        self.gateways.append(first)
        if self._wanted != 1:
            alive = _alive_nodes()
            if self._wanted is not None and self._wanted > len(alive):
                raise ConfigError(
                    f"gateways is {self._wanted}, and the cluster has {len(alive)} nodes; each gateway needs "
                    f"a node of its own: pass 1 to {len(alive)}, or per-node"
                )
            nodes = chosen_nodes(self._wanted, self._here, alive, [self._here])
            wanted = nodes if self._wanted is None else nodes[: self._wanted - 1]
            self.gateways += [Gateway(node_id, self._ports) for node_id in wanted]
        try:
            for gateway in self.gateways:
                self._begin(gateway)
            self._await_first(progress)
        except BaseException:
            for gateway in self.gateways:
                if gateway.actor is not None:
                    ray.kill(gateway.actor)
            raise
        self._tell_places()

    def _await_first(self, progress: Progress) -> None:
        calls = [self._asked(gateway) for gateway in self.gateways]
        what = "the gateway" if len(self.gateways) == 1 else f"{len(self.gateways)} gateways"
        try:
            told = wait_for(
                [call for asked in calls for call in asked],
                f"{what} to listen",
                progress,
                timeout_s=_START_TIMEOUT_S,
                failure=lambda: next((g.failure for g in self._groups if g.failure is not None), None),
            )
        except ConfigError as error:
            alive = _alive_nodes()
            for gateway, asked in zip(self.gateways, calls, strict=True):
                done, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
                if gateway.node_id is not None and any(error_of(call, what) is not None for call in done):
                    raise ConfigError(f"on node {alive.get(gateway.node_id)}: {error}") from error
            raise
        for number, gateway in enumerate(self.gateways):
            self._serves(gateway, *told[2 * number : 2 * number + 2])

    def supervise(self, joined: Callable[[Any], None]) -> None:
        """From now on start others in the places of those that die, and on new nodes.

        joined: told of each new process, once it serves.
        """
        self._joined = joined
        self._watcher = threading.Thread(target=self._watch, name="gateways", daemon=True)
        self._watcher.start()

    def tell(self, method: str, *arguments: object) -> None:
        """Each process that there is; those that come later are told what holds then."""
        with self._lock:
            starting = [] if self._starting in (None, *self.gateways) else [self._starting]
            for gateway in (*self.gateways, *starting):
                if gateway is not None and gateway.actor is not None:
                    getattr(gateway.actor, method).remote(*arguments)

    def group_moved(self, number: int, request_address: str) -> None:
        with self._lock:
            self._lost_groups.pop(number, None)
            self.tell("group_moved", number, request_address)

    def group_lost(self, number: int, reason: str) -> None:
        with self._lock:
            self._lost_groups[number] = reason
            self.tell("group_lost", number, reason)

    @property
    def live(self) -> list[Gateway]:
        return [gateway for gateway in list(self.gateways) if gateway.is_alive]

    @property
    def failure(self) -> str | None:
        """Why there is no gateway and will be none; None while there is one, or one is started."""
        failures = [gateway.failure for gateway in list(self.gateways)]
        return None if None in failures else "; ".join(filter(None, failures))

    def stop(self, drain_s: float, *, can_call: bool) -> None:
        """Let each drain, all at the same time; then end them."""
        self._is_stopping.set()
        if self._watcher is not None:
            self._watcher.join(_STOP_MARGIN_S)
        actors = [gateway.actor for gateway in self.gateways if gateway.actor is not None]
        if not can_call:
            return
        ending = [actor.stop.remote(drain_s) for actor in actors]
        if ending:
            ray.wait(ending, num_returns=len(ending), timeout=drain_s + _STOP_MARGIN_S)
        for actor in actors:
            ray.kill(actor)

    def _begin(self, gateway: Gateway) -> None:
        """Let its process start; whatever becomes of a group from now on it is told."""
        with self._lock:
            gateway.num_starts += 1
            self._starting = gateway
            gateway.actor = self._spawn(gateway.node_id, gateway.log_name, gateway.ports)
            for number, reason in self._lost_groups.items():
                gateway.actor.group_lost.remote(number, reason)

    @staticmethod
    def _asked(gateway: Gateway) -> list[Any]:
        is_first = gateway.num_starts == 1
        return [gateway.actor.node.remote(), gateway.actor.start.remote(is_first)]

    def _serves(self, gateway: Gateway, node: Node, address: str) -> None:
        actor = gateway.actor
        http, metrics, gateway.log_folder = ray.get(
            [actor.http_port.remote(), actor.metrics_port.remote(), actor.log_folder.remote()]
        )
        gateway.ports = Ports(int(address.rpartition(":")[2]), http, metrics)
        is_any = self._host in ("0.0.0.0", "::")
        gateway.address = address
        gateway.reached_at = f"{node.ip}:{gateway.ports.grpc}" if is_any else address
        title = "gateway" if gateway.node_id is None else f"gateway on {node.ip}"
        gateway.member = Member(title, actor, node, log_name=gateway.log_name)
        gateway.lost = actor.wait_lost.remote()
        gateway.since_s = time.monotonic()

    def _tell_places(self) -> None:
        """What runs where, for `latentray status` at any of them."""
        names = {name: node for group in self._groups for name, node in group.placement.items()}
        for gateway in self.gateways:
            if gateway.member is not None and gateway.failure is None:
                names[f"gateway at {gateway.reached_at}"] = gateway.member.node
        self.tell("show_actors", by_node(names))

    def _watch(self) -> None:
        look_at_s = time.monotonic()
        while not self._is_stopping.wait(_LOOK_S):
            if self._groups[0].session_failure is not None:
                return
            try:
                for gateway in self.gateways:
                    if gateway.failure is None and not gateway.is_alive:
                        self._replace(gateway)
                if self._wanted != 1 and time.monotonic() >= look_at_s:
                    look_at_s = time.monotonic() + _NODES_LOOK_S
                    self._look_at_nodes()
            except Exception:
                logger.exception("the gateways could not be looked after")

    def _look_at_nodes(self) -> None:
        """Give up the places of dead nodes, and take others."""
        alive = _alive_nodes()
        for gateway in self.gateways:
            if gateway.node_id is not None and gateway.node_id not in alive and gateway.failure is None:
                gateway.failure = f"the node of the gateway at {gateway.reached_at} is gone"
                logger.warning("%s", gateway.failure)
        taken = [gateway.node_id or self._here for gateway in self.gateways]
        now_s = time.monotonic()
        usable = {node: ip for node, ip in alive.items() if self._avoid_until_s.get(node, 0.0) <= now_s}
        for node_id in chosen_nodes(self._wanted, self._here, usable, taken):
            gateway = Gateway(node_id, self._ports)
            if self._bring_up(gateway):
                self.gateways.append(gateway)
                self._tell_places()
            else:
                self._avoid_until_s[node_id] = time.monotonic() + _AVOID_S

    def _replace(self, gateway: Gateway) -> None:
        """Another process in the place of one that has died, or the end of the place."""
        if gateway.node_id is not None and gateway.node_id not in _alive_nodes():
            return  # looked after with the nodes
        lived_s = time.monotonic() - gateway.since_s
        gateway.num_lost = 1 if lived_s > STEADY_S else gateway.num_lost + 1
        cause = self._cause(gateway)
        if gateway.num_lost > self._max_restarts:
            gateway.failure = cause
            return
        logger.warning("%s; another one is started", cause)
        if self._is_stopping.wait(back_off_s(gateway.num_lost)):
            return
        gateway.since_s = time.monotonic()
        if self._bring_up(gateway):
            self._tell_places()

    def _cause(self, gateway: Gateway) -> str:
        member = gateway.member
        if member is None or gateway.lost is None:
            return f"the gateway at {gateway.reached_at} did not start"
        log = None if gateway.log_folder is None else gateway.log_folder / f"{member.log_name}.log"
        try:
            ray.get(gateway.lost)
        except ray.exceptions.RayError as error:
            return f"{member} is lost: {cause_of_death(error, member, log)}"
        return f"{member} is lost"

    def _bring_up(self, gateway: Gateway) -> bool:
        """Whether it serves. What keeps it from that is logged, and tried again."""
        before = gateway.actor
        if before is not None:
            ray.kill(before)
        self._begin(gateway)
        asked = self._asked(gateway)
        done, pending = ray.wait(asked, num_returns=len(asked), timeout=_START_TIMEOUT_S)
        errors = [error for call in done if (error := error_of(call, "a gateway to listen")) is not None]
        if errors or pending or self._is_stopping.is_set():
            logger.warning("a gateway did not start: %s", errors[0] if errors else "it does not answer")
            ray.kill(gateway.actor)
            return False
        try:
            self._serves(gateway, *ray.get(asked))
            self._joined(gateway.actor)
        except (ray.exceptions.RayError, LatentrayError) as error:
            logger.warning("a gateway did not start: %s", error)
            return False
        return True


class _Follower:
    """Tells all gateways of one group."""

    def __init__(self, fleet: GatewayFleet, number: int) -> None:
        self._fleet = fleet
        self._number = number

    def moved(self, request_address: str) -> None:
        self._fleet.group_moved(self._number, request_address)

    def lost(self, reason: str) -> None:
        self._fleet.group_lost(self._number, reason)


def _alive_nodes() -> dict[str, str]:
    """Addresses by id."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
