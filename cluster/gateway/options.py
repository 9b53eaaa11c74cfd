"""Options of the gRPC server."""

from kernels_integration.errors import InvalidRequestError

MAX_MESSAGE_FLAG = "--max-message-size"
DEFAULT_MAX_MESSAGE_BYTES = 16 * 2**20
"""A prompt of a million token ids takes 3 to 5 MiB."""
WRITE_TIMEOUT_S = 300.0
"""A client that has read nothing for so long, over gRPC or HTTP, has gone."""
MIN_PING_INTERVAL_MS = 10_000
"""A client may ping this often, as with vLLM; one that does so more often is told GOAWAY "too_many_pings"."""
_TRANSPORT_FACTOR = 4
"""gRPC refuses what is larger than its own limit before a handler can name the flag: it gets some room."""


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options of `grpc.aio.server`. gRPC ignores unknown names, so each has a test of its effect."""
    return [
        # A router pings idle connections: by default every two hours at most, or every 300 s during a call.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.max_receive_message_length", _TRANSPORT_FACTOR * max_message_bytes),
        ("grpc.max_send_message_length", _TRANSPORT_FACTOR * max_message_bytes),
        # Two servers on one port would share its connections at random.
        ("grpc.so_reuseport", 0),
    ]


def require_message_fits(what: str, num_bytes: int, max_message_bytes: int, fix: str) -> None:
    """Errors: InvalidRequestError naming size, limit and flag."""
    if num_bytes > max_message_bytes:
        raise InvalidRequestError(
            f"{what} has {num_bytes} bytes; the server's limit is {max_message_bytes} "
            f"({MAX_MESSAGE_FLAG}); {fix}, or raise the limit",
            field="message",
        )
