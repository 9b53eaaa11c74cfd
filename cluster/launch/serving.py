"""A served model: groups on Ray and a gateway before them, started and stopped together."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from actors.config import GroupConfig
from actors.model_location import to_portable
from cluster.access.access import Access, AccessFiles
from cluster.access.exposure import is_loopback, require_protected
from cluster.answering.admission import Limits
from cluster.config import ServeArgs
from cluster.config.resolve import resolve
from cluster.control.operator import Operator
from cluster.launch.gateways import Gateway, GatewayFleet, Ports
from cluster.launch.group import GroupHandle, launch_groups
from cluster.report.memory import require_memory
from cluster.report.trace import TraceFile
from kernels_integration.errors import ConfigError

# isort: split
from cluster.gateway.gateway_actor import GatewayActor
from cluster.gateway.server import require_free_ports


class RunningServer:
    """Clients reach it at `address` (host:port). Stopped by `stop` or by leaving `with`."""

    def __init__(
        self,
        groups: Sequence[GroupHandle],
        fleet: GatewayFleet,
        config: GroupConfig,
        trace_file: TraceFile | None,
        operator: Operator,
    ) -> None:
        self.groups = tuple(groups)
        self.operator = operator
        self.config = config
        first = fleet.gateways[0]
        self.address = first.address
        self.http_port = first.ports.http
        """Of OpenAI's API; None: not served."""
        self.metrics_port = first.ports.metrics
        """Of Prometheus metrics; None: not served."""
        self.log_folder = first.log_folder
        """With a file for each process of this node; None where there could be none."""
        self._fleet = fleet
        self._is_stopped = False
        self._trace_file = trace_file

    @property
    def gateways(self) -> list[Gateway]:
        """Those that live now; the first one that was started is this node's."""
        return self._fleet.live

    @property
    def failure(self) -> str | None:
        """Why requests can be served no more; None while they can."""
        if (why := self._session_failure) is not None:
            return why
        if not self._is_stopped and (why := self._fleet.failure) is not None:
            return why
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
        """Whether a gateway lives, which tells clients of a failure; without Ray it soon will not."""
        return not self._is_stopped and self._session_failure is None and bool(self._fleet.live)

    def process_ids(self) -> dict[str, int]:
        """The process of each actor that lives, on its node: "gateway", "coordinator", "shard 0", ..."""
        ids = {name: pid for group in self.groups for name, pid in group.process_ids().items()}
        if self.is_reachable:
            members = [gateway.member for gateway in self._fleet.live]
            ids |= {member.name: member.node.pid for member in members if member is not None}
        return ids

    def stop(self, drain_s: float = 30.0) -> None:
        """Refuse new requests, let live ones end for at most drain_s, stop the group. May be called twice."""
        was_stopped, self._is_stopped = self._is_stopped, True
        trace_file, self._trace_file = self._trace_file, None
        self.operator.stop()
        try:
            if not was_stopped:
                self._fleet.stop(drain_s, can_call=self.groups[0].can_call)
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


def start_server(args: ServeArgs, *, progress: Callable[[str], None] = lambda message: None) -> RunningServer:
    """Start groups and gateways, one of them on this node; returns when requests are served.

    progress: called with what is waited for, about once a second.
    Errors: ConfigError, CheckpointError, ClusterTooSmallError, UnavailableError. Nothing is left behind.
    """
    config = resolve(args)
    require_protected(args)
    _require_any_host(args)
    access = AccessFiles.of(args)
    Access(access)  # their faults are told at once
    # told in the first second, not after the model has loaded
    require_free_ports(args.host, args.ports_by_flag())
    require_memory(config, address=args.address, num_groups=args.num_groups)
    trace_file = None if args.trace is None else TraceFile(args.trace)
    groups = launch_groups(
        config, args.num_groups, address=args.address, progress=progress, with_gateway=True
    )
    try:
        fleet = _fleet(args, config, groups, access)
        fleet.start(progress)
        operator = Operator(groups, reload=functools.partial(reload, args, config))
        for gateway in fleet.gateways:
            operator.joined(gateway.actor)
        fleet.supervise(operator.joined)
    except BaseException:
        for group in groups:
            group.stop()
        raise
    return RunningServer(groups, fleet, config, trace_file, operator)


def _fleet(
    args: ServeArgs, config: GroupConfig, groups: Sequence[GroupHandle], access: AccessFiles
) -> GatewayFleet:
    limits = Limits(
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        max_tenant_share=args.max_tenant_share,
        by_priority=config.scheduling_policy == "priority",
    )

    def spawn(node_id: str | None, title: str, ports: Ports) -> Any:
        return groups[0].start_gateway(
            GatewayActor,
            to_portable(config, "cluster"),
            [(group.request_address, group.request_keys) for group in groups],
            args.host,
            ports.grpc,
            args.max_message_size,
            ports.metrics,
            ports.http,
            groups[0].logs,
            limits,
            access,
            title,
            node_id=node_id,
            title=title,
        )

    return GatewayFleet(
        groups,
        spawn,
        wanted=args.gateways,
        host=args.host,
        ports=Ports(args.port, args.http_port, args.metrics_port),
        max_restarts=config.max_restarts,
    )


def _require_any_host(args: ServeArgs) -> None:
    """Errors: ConfigError where gateways on other nodes would have to listen on this node's address."""
    if args.gateways != 1 and args.host not in ("0.0.0.0", "::") and not is_loopback(args.host):
        raise ConfigError(
            f"host {args.host} is an address of this node, and --gateways asks for gateways on others; pass "
            "--host 0.0.0.0, which every node has"
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
