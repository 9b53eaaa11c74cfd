"""A served model: groups on Ray and a gateway before them, started and stopped together."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from actors.config import GroupConfig
from cluster.access.access import Access, AccessFiles
from cluster.access.exposure import require_protected
from cluster.answering.admission import Limits
from cluster.config import ServeArgs
from cluster.config.resolve import resolve
from cluster.control.operator import Operator
from cluster.launch.deaths import cause_of_death
from cluster.launch.group import GroupHandle, launch_groups
from cluster.launch.members import Member
from cluster.launch.placement import by_node
from cluster.launch.waiting import Progress, wait_for
from cluster.report.memory import require_memory
from cluster.report.trace import TraceFile
from kernels_integration.errors import ConfigError

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
        groups: Sequence[GroupHandle],
        gateway: Member,
        address: str,
        config: GroupConfig,
        trace_file: TraceFile | None,
        metrics_port: int | None,
        http_port: int | None,
        log_folder: Path | None,
        operator: Operator,
    ) -> None:
        self.groups = tuple(groups)
        self.operator = operator
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
        if (why := self._session_failure) is not None:
            return why
        gateway = self._gateway
        if gateway is not None and not self.is_reachable:
            try:
                ray.get(self._gateway_lost)
            except ray.exceptions.RayError as error:
                log = None if self.log_folder is None else self.log_folder / "gateway.log"
                return f"{gateway} is lost: {cause_of_death(error, gateway, log)}"
        failures = [group.failure for group in self.groups]
        # One group that is left serves all requests.
        return None if None in failures else "; ".join(filter(None, failures))

    @property
    def _session_failure(self) -> str | None:
        return self.groups[0].session_failure

    def memory(self) -> dict[str, int]:
        """Resident bytes of each actor of a group that lives."""
        return {name: size for group in self.groups for name, size in group.memory().items()}

    @property
    def is_reachable(self) -> bool:
        """Whether the gateway lives, which tells clients of a failure; without Ray it soon will not."""
        if self._gateway is None or self._session_failure is not None:
            return False
        return not ray.wait([self._gateway_lost], timeout=0)[0]

    def process_ids(self) -> dict[str, int]:
        """The process of each actor that lives, on its node: "gateway", "coordinator", "shard 0", ..."""
        ids = {name: pid for group in self.groups for name, pid in group.process_ids().items()}
        if self._gateway is not None and self.is_reachable:
            ids["gateway"] = self._gateway.node.pid
        return ids

    def stop(self, drain_s: float = 30.0) -> None:
        """Refuse new requests, let live ones end for at most drain_s, stop the group. May be called twice."""
        gateway, self._gateway = self._gateway, None
        trace_file, self._trace_file = self._trace_file, None
        self.operator.stop()
        try:
            if gateway is not None and self.groups[0].can_call:
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(gateway.actor.stop.remote(drain_s), timeout=drain_s + _STOP_MARGIN_S)
                ray.kill(gateway.actor)
            if trace_file is not None:
                for group in self.groups:
                    trace_file.add(group.take_trace())
                trace_file.write()
        finally:
            for group in self.groups:
                group.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop(drain_s=0.0 if exc_type else 30.0)


class GatewayFollower:
    """A gateway that is told of one of its groups, by the group's number there."""

    def __init__(self, gateway: Any, number: int) -> None:
        self._gateway = gateway
        self._number = number

    def moved(self, request_address: str) -> None:
        self._gateway.group_moved.remote(self._number, request_address)

    def lost(self, reason: str) -> None:
        self._gateway.group_lost.remote(self._number, reason)


def start_server(args: ServeArgs, *, progress: Callable[[str], None] = lambda message: None) -> RunningServer:
    """Start groups and a gateway on this node; returns when requests are served.

    progress: called with what is waited for, about once a second.
    Errors: ConfigError, CheckpointError, ClusterTooSmallError, UnavailableError. Nothing is left behind.
    """
    config = resolve(args)
    require_protected(args)
    access = AccessFiles.of(args)
    Access(access)  # their faults are told at once
    # told in the first second, not after the model has loaded
    require_free_ports(args.host, args.ports_by_flag())
    require_memory(config, address=args.address, num_groups=args.num_groups)
    trace_file = None if args.trace is None else TraceFile(args.trace)
    groups = launch_groups(
        config, args.num_groups, address=args.address, progress=progress, with_gateway=True
    )
    actors = {name: node for group in groups for name, node in group.placement.items()}
    try:
        gateway = groups[0].start_gateway(
            GatewayActor,
            config,
            [(group.request_address, group.request_keys) for group in groups],
            args.host,
            args.port,
            args.max_message_size,
            args.metrics_port,
            args.http_port,
            groups[0].logs,
            by_node(actors),
            Limits(
                max_queued_requests=args.max_queued_requests,
                max_queued_tokens=args.max_queued_tokens,
                max_tenant_share=args.max_tenant_share,
                by_priority=config.scheduling_policy == "priority",
            ),
            access,
        )
        for number, group in enumerate(groups):
            group.follow(GatewayFollower(gateway, number))
        address, member = _started(gateway, groups, progress)
    except BaseException:
        for group in groups:
            group.stop()
        raise
    metrics_port = None if args.metrics_port is None else ray.get(gateway.metrics_port.remote())
    http_port = None if args.http_port is None else ray.get(gateway.http_port.remote())
    log_folder = ray.get(gateway.log_folder.remote())
    return RunningServer(
        groups,
        member,
        address,
        config,
        trace_file,
        metrics_port,
        http_port,
        log_folder,
        Operator(groups, [gateway], reload=functools.partial(reload, args, config)),
    )


def reload(args: ServeArgs, before: GroupConfig, model: str) -> GroupConfig:
    """The settings of a group that goes over to another checkpoint, of the same kind.

    Errors: CheckpointError, ConfigError: front ends go on with the tokenizer and the limits that they have.
    """
    name = before.served_model_name
    config = resolve(args.model_copy(update={"model": model, "served_model_name": name}))
    for field in dataclasses.fields(config):
        was, would_be = getattr(before, field.name), getattr(config, field.name)
        if field.name != "model_path" and was != would_be:
            raise ConfigError(
                f"{model} cannot take the place of {before.model_path}: {field.name} would be {would_be!r} "
                f"and is {was!r}; start another server for it"
            )
    for file in _FILES_OF_FRONT_ENDS:
        if _content(before.model_path, file) != _content(config.model_path, file):
            raise ConfigError(
                f"{model} cannot take the place of {before.model_path}: its {file} is another, and gateways "
                "read it when they start; start another server for it"
            )
    return config


_FILES_OF_FRONT_ENDS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)


def _content(folder: str, file: str) -> bytes | None:
    path = Path(folder) / file
    return path.read_bytes() if path.is_file() else None


def _started(gateway: Any, groups: Sequence[GroupHandle], progress: Progress) -> tuple[str, Member]:
    """Where it listens, and what to call it. Errors: what kept it from starting, UnavailableError."""
    [node, address] = wait_for(
        [gateway.node.remote(), gateway.start.remote()],
        "the gateway to listen",
        progress,
        timeout_s=_START_TIMEOUT_S,
        failure=lambda: next((group.failure for group in groups if group.failure is not None), None),
    )
    return str(address), Member("gateway", gateway, node)
