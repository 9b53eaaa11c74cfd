"""Give an order to a running server, and hear what becomes of it."""

from collections.abc import Iterator

import grpc
import msgspec

from cluster.client import wire
from cluster.client.credentials import Credentials
from cluster.control.command import METHOD, SERVICE, Command, Said
from kernels_integration.errors import UnavailableError


def carry_out(server: str, command: Command, credentials: Credentials | None = None) -> Iterator[str]:
    """What the server says while it carries the order out, to its end. credentials: of an operator.

    Errors: ConfigError for a target that is none; what the server refuses or fails with.
    """
    target = wire.check_target(server)
    credentials = credentials or Credentials()
    with credentials.channel(target) as channel:
        call = channel.unary_stream(f"/{SERVICE}/{METHOD}")
        try:
            for data in call(msgspec.json.encode(command), metadata=credentials.metadata):
                yield msgspec.json.decode(data, type=Said).text
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise UnavailableError(
                    f"the server at {server} takes no orders: it is another version, or not `latentray serve`"
                ) from error
            raise wire.to_error(error, target) from error
