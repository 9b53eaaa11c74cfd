"""Calls without a valid API key end with UNAUTHENTICATED before their message is read."""

from collections.abc import AsyncIterator, Awaitable, Callable

import grpc
from grpc import aio

from cluster.access.api_keys import ApiKeys
from cluster.access.principal import ANYBODY, set_principal
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.request_record import RequestRecord
from cluster.gateway.statuses import errors_as_status
from kernels_integration.errors import InvalidApiKeyError

_OPEN = ("/grpc.health.v1.Health/", "/vllm.grpc.engine.VllmEngine/HealthCheck")
"""What probes ask, which have no key."""


class RequireKey(aio.ServerInterceptor):  # type: ignore[misc]
    """The first of the interceptors. Handlers find who asks by `current_principal`."""

    def __init__(self, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._keys = keys
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        if details.method.startswith(_OPEN):
            set_principal(ANYBODY)
            return await continuation(details)
        given = next((value for name, value in details.invocation_metadata if name == "authorization"), None)
        try:
            set_principal(self._keys.principal_of(given))
        except InvalidApiKeyError as error:
            return self._refusal(error, details.method.rpartition("/")[2])
        return await continuation(details)

    def _refusal(self, error: InvalidApiKeyError, call: str) -> grpc.RpcMethodHandler:
        async def refuse(messages: AsyncIterator[bytes], context: aio.ServicerContext) -> None:
            self._keys.note_refusal(context.peer())
            RequestRecord("", self._metrics).ended(error.code)
            async with errors_as_status(context, call):
                raise error

        # Of every kind of call: a stream's handler runs before the first message has come.
        return grpc.stream_stream_rpc_method_handler(refuse)
