"""Orders over gRPC, from this machine alone: who may start processes here may also ask for their end.

Where there are API keys, an operator's is needed too.
"""

from collections.abc import AsyncIterator

import grpc
import msgspec
from grpc import aio

from cluster.access.principal import current_principal
from cluster.control.command import METHOD, SERVICE, Command, Said
from cluster.control.desk import ControlDesk
from cluster.gateway.statuses import errors_as_status
from kernels_integration.errors import InvalidApiKeyError, InvalidRequestError

_LOCAL = ("ipv4:127.", "ipv6:[::1]:", "ipv6:%5B::1%5D:", "unix:")
_MAX_BYTES = 64 * 1024


def add_control(desk: ControlDesk, server: aio.Server) -> None:
    """Let operators on this machine give orders."""

    async def carry_out(data: bytes, context: aio.ServicerContext) -> AsyncIterator[bytes]:
        async with errors_as_status(context, METHOD):
            if not current_principal().is_operator:
                raise InvalidApiKeyError(
                    f"tenant {current_principal().tenant} gives no orders; send the key of an operator "
                    "(`operator: true` in the file of keys)"
                )
            async for text in desk.carry_out(_command(data, context.peer())):
                yield msgspec.json.encode(Said(text=text))

    handler = grpc.unary_stream_rpc_method_handler(carry_out)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))


def _command(data: bytes, peer: str) -> Command:
    """Errors: InvalidRequestError."""
    if not peer.startswith(_LOCAL):
        raise InvalidRequestError(
            f"an order came from {peer}; a server takes orders from its own machine alone: run the command "
            "there, with the loopback address (on Kubernetes: kubectl exec)",
            field="server",
        )
    if len(data) > _MAX_BYTES:
        raise InvalidRequestError(f"an order has {len(data)} bytes; it may have {_MAX_BYTES}", field="order")
    try:
        return msgspec.json.decode(data, type=Command)
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"this is no order: {error}", field="order") from error
