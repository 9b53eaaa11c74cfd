"""How many connections a server keeps, and for how long those that ask for nothing."""

import asyncio
import resource
from collections.abc import Callable
from typing import Any

from aiohttp import web

IDLE_S = 75.0
"""Until a connection is closed on which no whole request head has come; proxies keep theirs for 60."""
MAX_CONNECTIONS = 4096
_REFUSAL = (
    b'{"error":{"message":"the server has as many connections as it keeps; try again later",'
    b'"type":"invalid_request_error","param":null,"code":"overloaded"}}'
)


def max_connections() -> int:
    """Half of the files that this process may open: the rest is gRPC's, and the groups'."""
    return min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class LimitedRunner(web.AppRunner):
    """A runner that refuses connections beyond `limit`, in HTTP and at once."""

    def __init__(self, app: web.Application, *, limit: int, **options: Any) -> None:
        super().__init__(app, **options)
        self._limit = limit

    @property
    def server(self) -> Any:
        """What makes a protocol of each connection."""
        served = super().server
        return None if served is None else self._protocol_of(served)

    def _protocol_of(self, served: web.Server) -> Callable[[], asyncio.Protocol]:
        def protocol() -> asyncio.Protocol:
            return served() if len(served.connections) < self._limit else _Refusal()

        return protocol


class _Refusal(asyncio.Protocol):
    """Answers without having been asked, and closes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        head = (
            "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
            f"Content-Length: {len(_REFUSAL)}\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + _REFUSAL)
        transport.close()
