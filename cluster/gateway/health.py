"""grpc.health.v1 for a group: SERVING exactly while a token can be produced."""

import asyncio
from collections.abc import Sequence

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.answering.answering import Answering

POLL_INTERVAL_S = 0.2
"""Watchers learn of a change this late; Check and HealthCheck look at once."""


class GroupHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The health of "" (the whole server) and of the engine's service, read from the group when asked.

    grpc_health's own servicer is told of changes, holds a lock while it writes to a watcher, and starts as
    SERVING: one watcher that does not read would keep a lost group healthy for all others.
    """

    def __init__(self, answering: Answering, services: Sequence[str]) -> None:
        self._answering = answering
        self._services = frozenset(("", *services))

    @property
    def draining(self) -> bool:
        return self._answering.is_draining

    @property
    def serving(self) -> bool:
        return self._answering.groups.healthy and not self.draining

    @property
    def message(self) -> str:
        return "draining: the server is stopping" if self.draining else self._answering.groups.message

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            known = ", ".join(sorted(map(repr, self._services)))
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here; it must be one of {known}"
            )
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def List(  # noqa: N802
        self, request: health_pb2.HealthListRequest, context: aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        statuses = {
            service: health_pb2.HealthCheckResponse(status=self._status(service))
            for service in self._services
        }
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: aio.ServicerContext
    ) -> None:
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                await context.write(health_pb2.HealthCheckResponse(status=status))
                last = status
            await asyncio.sleep(POLL_INTERVAL_S)

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        if self.serving:
            return int(health_pb2.HealthCheckResponse.SERVING)
        return int(health_pb2.HealthCheckResponse.NOT_SERVING)
