"""Errors as HTTP answers: always OpenAI's envelope, whatever went wrong and wherever."""

import json
import math
import uuid
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cluster.errors import for_client, outcome, retry_after_s
from cluster.openai.error_body import envelope, error_body
from kernels_integration.errors import InvalidRequestError, LatentrayError, shortened, shown

REQUEST_ID_HEADER = "X-Request-Id"
REQUEST_ID = web.RequestKey("request_id", str)
_MAX_REQUEST_ID = 256


def error_response(error: LatentrayError) -> web.Response:
    status = outcome(error).http_status
    headers = {"Retry-After": str(math.ceil(retry_after_s(error)))} if status in (429, 503) else None
    return web.json_response(error_body(error), status=status, headers=headers)


def in_envelope(max_body_bytes: int) -> Middleware:
    """Turns every refusal and every fault into an answer, and names the request in every answer."""

    async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPRequestEntityTooLarge:
            return refused(413, f"the body has more than {max_body_bytes} bytes; shorten it")
        except web.HTTPMethodNotAllowed as error:
            allowed = sorted(error.allowed_methods)
            told = f"{request.path} takes {' or '.join(allowed)}, not {error.method}"
            return refused(405, told, Allow=", ".join(allowed))
        except web.HTTPNotFound:
            paths = sorted({resource.canonical for resource in request.app.router.resources()})
            return refused(404, f"there is no {shortened(request.path)} here; there are {', '.join(paths)}")
        except web.HTTPException as error:
            return refused(error.status, error.reason)
        except Exception as error:
            return error_response(for_client(error, request.path))

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = request_id = _given_id(request) or uuid.uuid4().hex
        response = await answered(request, handler)
        if not response.prepared:
            response.headers[REQUEST_ID_HEADER] = request_id
        return response

    return middleware


def refused(status: int, message: str, **headers: str) -> web.Response:
    """An answer to what is no request of an endpoint."""
    return web.json_response(envelope(message, status=status), status=status, headers=headers)


def request_id_of(request: web.Request) -> str:
    """The client's, or a new one. Errors: InvalidRequestError for one that the client may not give."""
    given = request.headers.get(REQUEST_ID_HEADER)
    if given is not None and _given_id(request) is None:
        raise InvalidRequestError(
            f"{REQUEST_ID_HEADER} is {shown(given)}; it must be 1 to {_MAX_REQUEST_ID} printable ASCII "
            "characters",
            field=REQUEST_ID_HEADER,
        )
    return request[REQUEST_ID]


def _given_id(request: web.Request) -> str | None:
    given = request.headers.get(REQUEST_ID_HEADER)
    legal = given and len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if legal else None


def event(data: dict[str, Any], *, named: bool = False) -> bytes:
    """One server-sent event. named: it has the name that the data has as "type"."""
    name = f"event: {data['type']}\n" if named else ""
    return f"{name}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


DONE = b"data: [DONE]\n\n"
