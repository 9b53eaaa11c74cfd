"""What is refused before it is a request of an endpoint is seen by operators like all that fails."""

import json

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cluster.errors import OUTCOMES
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.request_record import RequestRecord
from cluster.http.errors import REQUEST_ID, REQUEST_ID_HEADER

IS_RECORDED = web.RequestKey("is_recorded", bool)
"""Set by handlers that keep a record themselves."""
_STATE_PATHS = ("/health", "/ready")
"""Their 503 is an answer."""


def record_refusals(metrics: GatewayMetrics) -> Middleware:
    """Outside of what turns errors into answers: a record of each refusal that has none yet."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        refused = response.status >= 400 and IS_RECORDED not in request
        if refused and request.path not in _STATE_PATHS and isinstance(response, web.Response):
            code, field = _told(response)
            request_id = request.headers.get(REQUEST_ID_HEADER) or request[REQUEST_ID]
            RequestRecord(request_id, metrics).ended(code, field)
        return response

    return middleware


def _told(response: web.Response) -> tuple[str, str]:
    """The code and the field of an answer in OpenAI's envelope."""
    error = json.loads(response.text or "{}").get("error", {})
    code = error.get("code")
    if response.status == 429:
        code = "overloaded"
    elif code not in OUTCOMES:
        code = "invalid_request" if response.status < 500 else "internal"
    return code, error.get("param") or ""
