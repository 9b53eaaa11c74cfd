"""One port: the engine's service, grpc.health.v1 and reflection."""

import asyncio
import errno
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from actors.config import GroupConfig
from actors.sampling_params import MAX_VOCABULARY
from cluster.access.access import Access, AccessFiles
from cluster.answering.admission import NO_LIMITS, Limits
from cluster.answering.answering import Answering
from cluster.answering.group import Group, Groups
from cluster.control.desk import ControlDesk
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway.authentication import RequireKey
from cluster.gateway.control_service import add_control
from cluster.gateway.health import GroupHealth
from cluster.gateway.malformed import RefuseMalformed
from cluster.gateway.options import DEFAULT_MAX_MESSAGE_BYTES, server_options
from cluster.gateway.reflection import add_reflection
from cluster.gateway.servicer import SERVICE_NAME, VllmEngineServicer
from cluster.gateway.stats_log import log_stats
from cluster.gateway.status_document import StatusDocument
from cluster.gateway.wire_size import WireBounds
from kernels_integration.errors import ConfigError

if TYPE_CHECKING:
    from cluster.gateway.metrics_server import MetricsServer
    from cluster.http.server import HttpServer

MAX_SEQUENCES_PER_CLIENT = 1024
"""Completions that the requests of one host may have running or queued; a request has n."""
_SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
_MIN_TEXT_BYTES = 2**20
"""Texts beside the prompt, such as a grammar, have rules of their own, which name them better."""
_CLOSE_GRACE_S = 0.5
"""For the last statuses to leave, and for health watchers to read NOT_SERVING."""


class GatewayServer:
    """A gRPC server in the running event loop. The groups are connected, and outlive the server."""

    def __init__(
        self,
        *,
        frontend: ModelFrontend,
        groups: Sequence[Group],
        config: GroupConfig,
        host: str = "127.0.0.1",
        port: int = 50051,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        metrics_port: int | None = None,
        http_port: int | None = None,
        actors_by_node: Mapping[str, str] | None = None,
        limits: Limits = NO_LIMITS,
        desk: ControlDesk | None = None,
        access: AccessFiles | None = None,
    ) -> None:
        """actors_by_node: what `latentray status` shows of where the groups run. limits: of what waits.

        desk: takes operators' orders; None: nobody carries them out. access: who is served; None: everybody
        who reaches the ports. Errors: ConfigError for its files.
        """
        self._access = Access(access or AccessFiles())
        self._host = host
        self.port = port
        """0 until start() has taken a free one."""
        self._answering = Answering(groups, max_sequences_per_client=MAX_SEQUENCES_PER_CLIENT, limits=limits)
        self._health = GroupHealth(self._answering, (SERVICE_NAME,))
        self._actors_by_node = dict(actors_by_node or {})
        """Read by whoever is asked for it."""
        self._servicer = VllmEngineServicer(
            frontend=frontend,
            answering=self._answering,
            config=config,
            health=self._health,
            max_message_bytes=max_message_bytes,
            actors_by_node=self._actors_by_node,
        )
        self._status = StatusDocument(
            answering=self._answering,
            config=config,
            health=self._health,
            loads=self._servicer.loads,
            metrics=self._servicer.metrics,
            actors_by_node=self._actors_by_node,
        )
        self._max_message_bytes = max_message_bytes
        self.metrics_port = metrics_port
        """Of Prometheus metrics; 0 until start() has taken a free one; None: not served."""
        self._metrics_server: MetricsServer | None = None
        self._frontend = frontend
        self._config = config
        self.http_port = http_port
        """Of OpenAI's API; 0 until start() has taken a free one; None: not served."""
        self._http_server: HttpServer | None = None
        self._desk = desk
        self._server: aio.Server | None = None
        self._beside: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()

    @property
    def groups(self) -> Groups:
        """Those that answer, and which of them take requests."""
        return self._answering.groups

    @property
    def address(self) -> str:
        """host:port, as clients write it."""
        return _joined(self._host, self.port)

    def show_actors(self, actors_by_node: Mapping[str, str]) -> None:
        """What runs where, for people who ask."""
        self._actors_by_node.clear()
        self._actors_by_node.update(actors_by_node)

    async def start(self) -> None:
        """Listen. Errors: ConfigError when the port is taken or the host is not this machine's."""
        require_free(self._host, self.port)
        keys, tls, metrics = self._access.keys, self._access.tls, self._servicer.metrics
        malformed = RefuseMalformed(_SERVICE, _bounds_of(self._frontend), metrics)
        server = aio.server(
            interceptors=(malformed,) if keys is None else (RequireKey(keys, metrics), malformed),
            options=server_options(self._max_message_bytes),
        )
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._desk is not None:
            add_control(self._desk, server)
        add_reflection((SERVICE_NAME, health.SERVICE_NAME), server)
        try:
            if tls is None:
                self.port = server.add_insecure_port(self.address)
            else:
                self.port = server.add_secure_port(self.address, tls.grpc_credentials())
        except RuntimeError as error:
            raise _cannot_listen(self._host, self.port, str(error)) from error
        if self.metrics_port is not None:
            # Not at the top: aiohttp takes half a second to import, and few serve metrics.
            from cluster.gateway.metrics_server import MetricsServer

            self._metrics_server = MetricsServer(metrics.registry)
            self.metrics_port = await self._metrics_server.start(self._host, self.metrics_port, tls)
        if self.http_port is not None:
            from cluster.http.server import HttpServer

            self._http_server = HttpServer(
                frontend=self._frontend,
                answering=self._answering,
                config=self._config,
                health=self._health,
                metrics=metrics,
                keys=keys,
                status=self._status.read,
                max_body_bytes=self._max_message_bytes,
            )
            self.http_port = await self._http_server.start(self._host, self.http_port, tls)
        await server.start()
        self._server = server
        beside = (
            self._access.follow(),
            self._servicer.loads.sample_groups(),
            log_stats(self._answering.groups),
        )
        self._beside = [asyncio.create_task(work) for work in beside]

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self._stopped.wait()

    async def stop(self, drain_s: float = 30.0) -> None:
        """Refuse new requests, give live ones `drain_s` seconds, end the rest with UNAVAILABLE, close."""
        if self._server is None:
            return
        server, self._server = self._server, None
        await self._answering.drain(drain_s)
        for task in self._beside:
            task.cancel()
        await server.stop(_CLOSE_GRACE_S)
        for beside in (self._metrics_server, self._http_server):
            if beside is not None:
                await beside.stop()
        self._stopped.set()


def require_free_ports(host: str, ports: Mapping[str, int | None]) -> None:
    """`require_free` for the ports of a server that is to start, by their flags; None: not wanted.

    Errors: ConfigError, also when two flags give one port.
    """
    flags: dict[int, str] = {}
    for flag, port in ports.items():
        if port and port in flags:
            raise ConfigError(
                f"{flags[port]} and {flag} are both {port}; pass another {flag} (0 takes a free one)"
            )
        flags[port or 0] = flag
    for flag, port in ports.items():
        if port is not None:
            require_free(host, port, flag=flag)


_OR_NONE = {"--http-port": "; none serves gRPC alone", "--metrics-port": "; none serves no metrics there"}
"""What more may be said of a flag."""


def require_free(host: str, port: int, *, flag: str = "--port") -> None:
    """Errors: ConfigError when the port, which `flag` gives, is taken or the host is not of this machine.

    Binds every address of the host once: gRPC is content with one of them, and says less when it fails.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, str(error), flag) from error
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ConfigError(
                        f"port {port} of {host} is in use; stop the server that has it, or pass another "
                        f"{flag} (0 takes a free one{_OR_NONE.get(flag, '')})"
                    ) from error
                if error.errno == errno.EADDRNOTAVAIL and len(addresses) > 1:
                    continue  # localhost may name ::1 where IPv6 is off
                raise _cannot_listen(host, port, str(error), flag) from error


def _cannot_listen(host: str, port: int, cause: str, flag: str = "--port") -> ConfigError:
    return ConfigError(
        f"cannot listen on {_joined(host, port)}: {cause}; pass an address of this machine as --host "
        f"(0.0.0.0 for all) and a port that you may use as {flag}"
    )


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bounds_of(frontend: ModelFrontend) -> WireBounds:
    """What is above them would be refused after decoding too, only later."""
    characters = frontend.max_prompt_characters
    return WireBounds(
        max_values=max(frontend.max_model_len, MAX_VOCABULARY),
        # of a character UTF-8 makes up to four bytes
        max_text_bytes=None if characters is None else max(4 * characters, _MIN_TEXT_BYTES),
    )
