"""Bytes that are no message of their call, or one that takes too much memory, end it with INVALID_ARGUMENT.

gRPC by itself answers INTERNAL, as if the server were at fault, before a handler is asked.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc import aio

from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.request_record import RequestRecord
from cluster.gateway.statuses import errors_as_status
from cluster.gateway.wire_size import WireBounds, check_size, text_of
from kernels_integration.errors import InvalidRequestError, LatentrayError


class RefuseMalformed(aio.ServerInterceptor):  # type: ignore[misc]
    """Decodes the requests of all unary calls and streams of answers; other kinds pass.

    service: whose requests are held to the bounds, and recorded where they are refused.
    """

    def __init__(self, service: ServiceDescriptor, bounds: WireBounds, metrics: GatewayMetrics) -> None:
        self._messages = {
            f"/{service.full_name}/{method.name}": method.input_type for method in service.methods
        }
        self._bounds = bounds
        self._metrics = metrics

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler: Any = await continuation(details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        call = details.method.rpartition("/")[2]
        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        message = self._messages.get(details.method)

        def decode(data: bytes) -> Any:
            if message is not None:
                check_size(data, message, self._bounds)
            try:
                return handler.request_deserializer(data)
            except DecodeError as error:
                raise InvalidRequestError(
                    f"the {len(data)} bytes of the request are no message of {call}: {error}; check that "
                    "client and server use the same protocol",
                    field="message",
                ) from error

        def decode_recorded(data: bytes) -> Any:
            try:
                return decode(data)
            except Exception as error:
                if message is not None:
                    request_id = text_of(data, message, "request_id")
                    code = getattr(error, "code", LatentrayError.code)
                    RequestRecord(request_id, self._metrics).ended(code, getattr(error, "field", ""))
                raise

        behaviour = _decoding(getattr(handler, kind), decode_recorded, call)
        return handler._replace(request_deserializer=None, **{kind: behaviour})


def _decoding(behaviour: Any, decode: Callable[[bytes], Any], call: str) -> Any:
    """The same handler, of the request's bytes."""

    async def decoded(data: bytes, context: aio.ServicerContext) -> Any:
        async with errors_as_status(context, call):
            return decode(data)

    async def answer(data: bytes, context: aio.ServicerContext) -> Any:
        return await behaviour(await decoded(data, context), context)

    async def generate(data: bytes, context: aio.ServicerContext) -> AsyncIterator[Any]:
        async for response in behaviour(await decoded(data, context), context):
            yield response

    return generate if inspect.isasyncgenfunction(behaviour) else answer
