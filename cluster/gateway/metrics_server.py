"""Prometheus metrics over HTTP, in the gateway's event loop: an idle connection costs a socket, no thread."""

from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

from cluster.access.tls import ServerTls
from cluster.http.connections import IDLE_S, PROTOCOL_LOG, LimitedRunner
from kernels_integration.errors import ConfigError

_MAX_CONNECTIONS = 256
"""Scrapers are few."""
_OPENMETRICS = "application/openmetrics-text"


class MetricsServer:
    """Answers GET /metrics, as OpenMetrics where that is asked for, else as Prometheus' text."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, tls: ServerTls | None = None) -> int:
        """Listen; the port (a free one for 0). Errors: ConfigError when it cannot be had."""
        application = web.Application()
        application.router.add_get("/metrics", self._metrics)
        runner = LimitedRunner(
            application,
            limit=_MAX_CONNECTIONS,
            logger=PROTOCOL_LOG,
            access_log=None,
            shutdown_timeout=0,
            keepalive_timeout=IDLE_S,
        )
        port = await listen(runner, host, port, what="metrics", flag="--metrics-port", tls=tls)
        self._runner = runner
        return port

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        return metrics_response(self._registry, request)


async def listen(
    runner: web.AppRunner, host: str, port: int, *, what: str, flag: str, tls: ServerTls | None = None
) -> int:
    """The port (a free one for 0). Errors: ConfigError when it cannot be had; the runner is then cleaned."""
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=None if tls is None else tls.context).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"cannot listen on {host}:{port} for {what}: {error.strerror}; pass another {flag} "
            "(0 takes a free one)"
        ) from error
    return int(runner.addresses[0][1])


def metrics_response(registry: CollectorRegistry, request: web.Request) -> web.Response:
    """All metrics, as OpenMetrics where that is asked for, else as Prometheus' text."""
    if _OPENMETRICS in request.headers.get("Accept", ""):
        # Our names are legal under every escaping scheme, so none is applied and none is named:
        # prometheus_client would escape the colons of samples, and not those of their HELP and TYPE.
        generate: Any = openmetrics.generate_latest  # untyped
        text = generate(registry, escaping=openmetrics.ALLOWUTF8)
        content_type = openmetrics.CONTENT_TYPE_LATEST
    else:
        text, content_type = generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4
    response = web.Response(body=text, headers={"Content-Type": content_type})
    response.enable_compression()
    return response
