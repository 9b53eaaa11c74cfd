"""A served model: a group on Ray and a gateway before it, started and stopped together."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from actors.config import GroupConfig
from cluster.config import ServeArgs
from cluster.config.resolve import resolve
from cluster.launch.deaths import cause_of_death
from cluster.launch.group import GroupHandle, launch_group
from cluster.launch.members import Member
from cluster.launch.placement import by_node
from cluster.launch.waiting import Progress, wait_for
from cluster.report.memory import require_memory
from cluster.report.trace import TraceFile

# isort: split
import ray
import ray.exceptions

from cluster.gateway.gateway_actor import GatewayActor
from cluster.gateway.server import require_free_ports

_START_TIMEOUT_S = 120.0
_STOP_MARGIN_S = 10.0
"""What a gateway may take beyond its drain before it is killed."""


class RunningServer:
    """Clients reach it at `address` (host:port). Stopped by `stop` or by leaving `with`."""

    def __init__(
        self,
        group: GroupHandle,
        gateway: Member,
        address: str,
        config: GroupConfig,
        trace_file: TraceFile | None,
        metrics_port: int | None,
        http_port: int | None,
        log_folder: Path | None,
    ) -> None:
        self.group = group
        self.address = address
        self.config = config
        self.http_port = http_port
        """Of OpenAI's API; None: not served."""
        self.metrics_port = metrics_port
        """Of Prometheus metrics; None: not served."""
        self.log_folder = log_folder
        """With a file for each process of this node; None where there could be none."""
        self._gateway: Member | None = gateway
        self._gateway_lost = gateway.actor.wait_lost.remote()
        self._trace_file = trace_file

    @property
    def failure(self) -> str | None:
        """Why requests can be served no more; None while they can."""
        if (why := self.group.session_failure) is not None:
            return why
        gateway = self._gateway
        if gateway is not None and not self.is_reachable:
            try:
                ray.get(self._gateway_lost)
            except ray.exceptions.RayError as error:
                log = None if self.log_folder is None else self.log_folder / "gateway.log"
                return f"{gateway} is lost: {cause_of_death(error, gateway, log)}"
        return self.group.failure

    @property
    def is_reachable(self) -> bool:
        """Whether the gateway lives, which tells clients of a failure; without Ray it soon will not."""
        if self._gateway is None or self.group.session_failure is not None:
            return False
        return not ray.wait([self._gateway_lost], timeout=0)[0]

    def process_ids(self) -> dict[str, int]:
        """The process of each actor that lives, on its node: "gateway", "coordinator", "shard 0", ..."""
        ids = self.group.process_ids()
        if self._gateway is not None and self.is_reachable:
            ids["gateway"] = self._gateway.node.pid
        return ids

    def stop(self, drain_s: float = 30.0) -> None:
        """Refuse new requests, let live ones end for at most drain_s, stop the group. May be called twice."""
        gateway, self._gateway = self._gateway, None
        trace_file, self._trace_file = self._trace_file, None
        try:
            if gateway is not None and self.group.session_failure is None:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(gateway.actor.stop.remote(drain_s), timeout=drain_s + _STOP_MARGIN_S)
                ray.kill(gateway.actor)
            if trace_file is not None:
                trace_file.add(self.group.take_trace())
                trace_file.write()
        finally:
            self.group.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(drain_s=0.0 if exc_type else 30.0)


def start_server(args: ServeArgs, *, progress: Callable[[str], None] = lambda message: None) -> RunningServer:
    """Start a group and a gateway on this node; returns when requests are served.

    progress: called with what is waited for, about once a second.
    Errors: ConfigError, CheckpointError, ClusterTooSmallError, UnavailableError. Nothing is left behind.
    """
    config = resolve(args)
    # told in the first second, not after the model has loaded
    require_free_ports(args.host, args.ports_by_flag())
    require_memory(config, address=args.address)
    trace_file = None if args.trace is None else TraceFile(args.trace)
    group = launch_group(config, address=args.address, progress=progress, with_gateway=True)
    try:
        gateway = group.start_gateway(
            GatewayActor,
            config,
            [group.request_address],
            args.host,
            args.port,
            args.max_message_size,
            args.metrics_port,
            args.http_port,
            group.logs,
            by_node(group.placement),
        )
        address, member = _started(gateway, group, progress)
    except BaseException:
        group.stop()
        raise
    metrics_port = None if args.metrics_port is None else ray.get(gateway.metrics_port.remote())
    http_port = None if args.http_port is None else ray.get(gateway.http_port.remote())
    log_folder = ray.get(gateway.log_folder.remote())
    return RunningServer(group, member, address, config, trace_file, metrics_port, http_port, log_folder)


def _started(gateway: Any, group: GroupHandle, progress: Progress) -> tuple[str, Member]:
    """Where it listens, and what to call it. Errors: what kept it from starting, UnavailableError."""
    [node, address] = wait_for(
        [gateway.node.remote(), gateway.start.remote()],
        "the gateway to listen",
        progress,
        timeout_s=_START_TIMEOUT_S,
        failure=lambda: group.failure,
    )
    return str(address), Member("gateway", gateway, node)
