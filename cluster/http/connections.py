"""How many connections a server keeps, and for how long those that ask for nothing."""

import asyncio
import json
import logging
import resource
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from cluster.http.errors import refused
from cluster.openai.error_body import error_body
from kernels_integration.errors import OverloadedError, shortened

IDLE_S = 75.0
"""Until a connection is closed on which no whole request head has come; proxies keep theirs for 60."""
MAX_CONNECTIONS = 4096
PROTOCOL_LOG = logging.getLogger("latentray.http")
PROTOCOL_LOG.setLevel(logging.CRITICAL)  # else whoever sends no HTTP fills the log with traces
_REFUSAL = json.dumps(
    error_body(OverloadedError("the server has as many connections as it keeps; try again later"))
).encode()


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
        options = served._kwargs  # as the server's own protocols have them

        def protocol() -> asyncio.Protocol:
            if len(served.connections) >= self._limit:
                return _Refusal()
            return _Protocol(served, loop=asyncio.get_running_loop(), **options)

        return protocol


class _Protocol(RequestHandler):
    """Answers what is no HTTP as it answers all else."""

    __slots__ = ()

    def handle_error(self, *args: Any, **named: Any) -> web.StreamResponse:
        """A request that could not be read, or a fault outside all handlers."""
        plain = super().handle_error(*args, **named)
        told = shortened((getattr(plain, "text", None) or "").partition("\n")[0].strip())
        words = f"the request is not HTTP as it is spoken here: {told}" if plain.status < 500 else told
        response = refused(plain.status, words)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Of what was refused before any middleware, such as an Expect that nobody knows."""
        if isinstance(resp, web.HTTPException):
            resp = refused(resp.status, resp.text or resp.reason)
        return await super().finish_response(request, resp, start_time)


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
