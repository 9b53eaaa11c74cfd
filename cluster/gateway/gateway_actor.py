"""A gateway under Ray's supervision: arguments, start, stop. The work is GatewayServer's."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from actors.actor_process import Node, this_node
from actors.config import GroupConfig
from actors.gcs_watch import end_with_gcs
from actors.logs import LogSettings, start_logging
from actors.model_location import to_local
from actors.transport.channel_keys import MemberKeys
from cluster.access.access import AccessFiles
from cluster.answering.admission import NO_LIMITS, Limits
from cluster.answering.group import Drained, Groups
from cluster.answering.group_client import GroupClient
from cluster.control.command import Command
from cluster.control.desk import ControlDesk
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway.server import GatewayServer

logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0)  # it waits for sockets
class GatewayActor:
    """One gateway process on the node where Ray puts it. It imports no torch.

    groups: where each can be asked, and the keys for that.
    """

    def __init__(
        self,
        config: GroupConfig,
        groups: Sequence[tuple[str, MemberKeys]],
        host: str,
        port: int,
        max_message_bytes: int,
        metrics_port: int | None = None,
        http_port: int | None = None,
        logs: LogSettings | None = None,
        limits: Limits = NO_LIMITS,
        access: AccessFiles | None = None,
        log_name: str = "gateway",
    ) -> None:
        self._log_folder = None if logs is None else start_logging(logs, log_name)
        self._config = to_local(config)
        recovery_s = config.recovery_timeout_s if config.max_restarts else 0.0
        self._groups = [GroupClient(address, keys=keys, recovery_s=recovery_s) for address, keys in groups]
        self._host = host
        self._port = port
        self._max_message_bytes = max_message_bytes
        self._metrics_port = metrics_port
        self._http_port = http_port
        self._limits = limits
        self._access = access
        self._server: GatewayServer | None = None
        self._desk = ControlDesk()
        self._lost: set[int] = set()
        """Groups that have failed for good."""

    async def start(self, all_must_answer: bool = True) -> str:
        """Connect to the groups, listen, return host:port. Errors: ConfigError, UnavailableError.

        all_must_answer: else it begins without the groups that recover now, and takes them when they answer.
        """
        config = self._config
        frontend = await asyncio.to_thread(ModelFrontend.of_group, config)
        found = await asyncio.gather(
            *(group.connect() for number, group in enumerate(self._groups) if number not in self._lost),
            return_exceptions=not all_must_answer,
        )
        if errors := [error for error in found if isinstance(error, BaseException)]:
            logger.warning("began without a group: %s", errors[0])
        self._server = GatewayServer(
            frontend=frontend,
            groups=self._groups,
            config=config,
            host=self._host,
            port=self._port,
            max_message_bytes=self._max_message_bytes,
            metrics_port=self._metrics_port,
            http_port=self._http_port,
            limits=self._limits,
            desk=self._desk,
            access=self._access,
        )
        await self._server.start()
        return self._server.address

    async def http_port(self) -> int | None:
        """Where OpenAI's API is served; None: nowhere."""
        return self._server.http_port if self._server is not None else None

    def __repr__(self) -> str:
        """What Ray's lists, dashboard and log lines call it."""
        return "gateway"

    async def node(self) -> Node:
        """Where it runs."""
        return this_node()

    async def metrics_port(self) -> int | None:
        """Where Prometheus metrics are served; None: nowhere."""
        return self._server.metrics_port if self._server is not None else None

    async def log_folder(self) -> Path | None:
        """Where this process logs; None: nowhere."""
        return self._log_folder

    async def end_with_gcs(self, patience_s: float) -> None:
        """Do not outlive Ray's control process."""
        end_with_gcs(patience_s)

    async def wait_lost(self) -> None:
        """Never returns: its call fails when this process dies."""
        await asyncio.Event().wait()

    async def group_moved(self, number: int, request_address: str) -> None:
        """The coordinator of a group has a successor."""
        self._lost.discard(number)
        self._groups[number].move(request_address)

    async def group_lost(self, number: int, reason: str) -> None:
        """A group has failed for good."""
        self._lost.add(number)
        self._groups[number].lose(reason)

    async def show_actors(self, actors_by_node: Mapping[str, str]) -> None:
        """What runs where, from now on."""
        if self._server is not None:
            self._server.show_actors(actors_by_node)

    async def next_command(self) -> Command:
        """Waits for an operator's next order; who holds the groups carries it out."""
        return await self._desk.fetch()

    async def command_said(self, text: str) -> None:
        self._desk.say(text)

    async def command_ended(self, code: str | None, text: str) -> None:
        self._desk.end(code, text)

    async def drain_group(self, number: int, reason: str, returns: bool) -> None:
        """It takes no sequences from now on; see Groups.drain."""
        self._routes.drain(self._groups[number], Drained(reason=reason, returns=returns))

    async def undrain_group(self, number: int) -> None:
        self._routes.undrain(self._groups[number])

    async def let_go(self, number: int, reason: str) -> None:
        """Its sequences go on at another group, or when it returns; see GroupClient.let_go."""
        self._groups[number].let_go(reason)

    async def num_sequences(self, number: int) -> int:
        """That this gateway has running there."""
        return self._routes.num_sequences_of(self._groups[number])

    async def is_healthy(self, number: int) -> bool:
        """Whether this gateway has heard that the group can answer."""
        return self._groups[number].healthy

    async def set_weights(self, number: int, weights: int) -> None:
        self._routes.set_weights(self._groups[number], weights)

    @property
    def _routes(self) -> Groups:
        assert self._server is not None, "orders come to a gateway that has started"
        return self._server.groups

    async def stop(self, drain_s: float = 30.0) -> None:
        """Drain and close; see GatewayServer.stop."""
        if self._server is not None:
            await self._server.stop(drain_s)
        for group in self._groups:
            await group.close()
