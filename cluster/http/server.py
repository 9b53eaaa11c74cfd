"""The HTTP server of a gateway: routes, limits, start and stop."""

import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from actors.config import GroupConfig
from cluster import __version__
from cluster.access.api_keys import ApiKeys
from cluster.access.tls import ServerTls
from cluster.answering.answering import Answering
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway.health import GroupHealth
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.metrics_server import listen, metrics_response
from cluster.http.authentication import require_key
from cluster.http.completions import Completions
from cluster.http.connections import IDLE_S, PROTOCOL_LOG, LimitedRunner, max_connections
from cluster.http.errors import in_envelope
from cluster.http.openapi import openapi_document
from cluster.http.refusals import record_refusals
from cluster.http.request_body import BodyReader
from cluster.http.status_page import StatusPage
from cluster.http.tokenizing import Tokenizing
from cluster.openai.bodies import ENDPOINTS
from kernels_integration.errors import UnknownModelError, shown

_CLOSE_GRACE_S = 0.5
_MAX_HEADER_BYTES = 16 * 2**10


class HttpServer:
    """Serves what a gateway's answering answers. Draining and limits are its owner's and Answering's."""

    def __init__(
        self,
        *,
        frontend: ModelFrontend,
        answering: Answering,
        config: GroupConfig,
        health: GroupHealth,
        metrics: GatewayMetrics,
        status: Callable[[], dict[str, Any]],
        max_body_bytes: int,
        keys: ApiKeys | None = None,
    ) -> None:
        self._frontend = frontend
        self._config = config
        self._health = health
        self._metrics = metrics
        self._started_at = int(time.time())
        self._bodies = bodies = BodyReader(max_body_bytes)
        self._completions = Completions(
            frontend=frontend, answering=answering, metrics=metrics, bodies=bodies
        )
        self._app = web.Application(
            middlewares=[record_refusals(metrics), in_envelope(max_body_bytes), require_key(keys)],
            client_max_size=max_body_bytes,
        )
        for path in ENDPOINTS:
            self._app.router.add_post(path, self._completions.answer)
        routes = {
            "/v1/models": self._models,
            "/v1/models/{model}": self._model,
            "/health": self._state,
            "/ready": self._state,
            "/version": self._version,
            "/metrics": self._all_metrics,
            "/openapi.json": self._openapi,
        }
        for path, handler in routes.items():
            self._app.router.add_get(path, handler)
        Tokenizing(frontend=frontend, bodies=bodies).add_to(self._app.router)
        StatusPage(status).add_to(self._app.router)
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, tls: ServerTls | None = None) -> int:
        """Listen; the port (a free one for 0). Errors: ConfigError when it cannot be had."""
        runner = LimitedRunner(
            self._app,
            limit=max_connections(),
            keepalive_timeout=IDLE_S,
            logger=PROTOCOL_LOG,
            access_log=None,  # requests have a line of their own, with what they cost
            handler_cancellation=True,
            auto_decompress=False,  # a small body could hold the loop for seconds
            shutdown_timeout=_CLOSE_GRACE_S,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )
        port = await listen(runner, host, port, what="HTTP", flag="--http-port", tls=tls)
        self._runner = runner
        return port

    async def stop(self) -> None:
        """Close. Requests have been drained by the owner."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, http: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def _model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        if name != self._frontend.served_model_name:
            raise UnknownModelError(
                f"there is no model {shown(name)} here; there is {self._frontend.served_model_name!r}",
                field="model",
            )
        return web.json_response(self._model_card())

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._frontend.served_model_name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "latentray",
            "max_model_len": self._config.max_model_len,
        }

    async def _state(self, http: web.Request) -> web.Response:
        """200 exactly while a token can be produced."""
        status = 200 if self._health.serving else 503
        text = "serving" if self._health.serving else self._health.message
        return web.json_response({"status": text}, status=status)

    async def _version(self, http: web.Request) -> web.Response:
        return web.json_response({"version": __version__})

    async def _openapi(self, http: web.Request) -> web.Response:
        return web.json_response(openapi_document(self._frontend.served_model_name))

    async def _all_metrics(self, http: web.Request) -> web.Response:
        return metrics_response(self._metrics.registry, http)
