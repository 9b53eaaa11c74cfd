"""Errors as HTTP answers: always OpenAI's envelope, whatever went wrong and wherever."""

import json
import math
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cluster.errors import for_client, outcome, retry_after_s
from cluster.openai.answers import error_body
from kernels_integration.errors import LatentrayError

REQUEST_ID_HEADER = "X-Request-Id"


def error_response(error: LatentrayError) -> web.Response:
    status = outcome(error).http_status
    headers = {"Retry-After": str(math.ceil(retry_after_s(error)))} if status in (429, 503) else None
    return web.json_response(error_body(error), status=status, headers=headers)


def in_envelope(max_body_bytes: int) -> Middleware:
    """Turns every refusal and every fault into an answer."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return _refused(413, f"the body has more than {max_body_bytes} bytes; shorten it")
        except web.HTTPMethodNotAllowed as error:
            allowed = sorted(error.allowed_methods)
            told = f"{request.path} takes {' or '.join(allowed)}, not {error.method}"
            return _refused(405, told, Allow=", ".join(allowed))
        except web.HTTPNotFound:
            paths = sorted({resource.canonical for resource in request.app.router.resources()})
            return _refused(404, f"there is no {request.path} here; there are {', '.join(paths)}")
        except web.HTTPException as error:
            return _refused(error.status, error.reason)
        except Exception as error:
            return error_response(for_client(error, request.path))

    return middleware


def _refused(status: int, message: str, **headers: str) -> web.Response:
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": body}, status=status, headers=headers)


def event(data: dict[str, Any], *, named: bool = False) -> bytes:
    """One server-sent event. named: it has the name that the data has as "type"."""
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


DONE = b"data: [DONE]\n\n"
