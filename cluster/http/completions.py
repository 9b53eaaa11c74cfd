"""/v1/chat/completions and /v1/completions: a body, its request, its answer whole or in pieces."""

import asyncio
import json
import math
import uuid
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from aiohttp import web

from actors.requests import Request, RequestUpdate
from cluster.answering.answering import Answering
from cluster.errors import for_client
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.request_record import RequestRecord, recorded
from cluster.http.errors import DONE, REQUEST_ID_HEADER, event
from cluster.openai.answers import answer_body, error_body
from cluster.openai.bodies import ChatBody, CompletionsBody, check_model, parse_body
from cluster.openai.chunks import Chunks
from cluster.outputs import OutputBuilder
from kernels_integration.errors import InvalidRequestError, shown

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds that the client will wait."""
_MAX_REQUEST_ID = 256
_TOKENIZING_THREADS = 2


class Completions:
    """Answers the two endpoints. A client that goes away cancels its handler, which ends its request."""

    def __init__(self, *, frontend: ModelFrontend, answering: Answering, metrics: GatewayMetrics) -> None:
        self._frontend = frontend
        self._answering = answering
        self._metrics = metrics
        self._tokenizing = ThreadPoolExecutor(_TOKENIZING_THREADS, thread_name_prefix="http-tokenizing")

    async def answer(self, http: web.Request) -> web.StreamResponse:
        """Errors: those of the body and of Answering; what fails later is told inside the stream."""
        request_id = _request_id(http)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _timeout_s(http)

        def time_left_s() -> float | None:
            return None if math.isinf(ends_at) else ends_at - loop.time()

        stream = EventStream(http, request_id)
        try:
            with recorded(request_id, self._metrics, time_left_s) as record:
                async with self._answering.admit(
                    request_id, client=http.remote or "", time_left_s=time_left_s()
                ) as live:
                    body = parse_body(http.path, await json_object(http), may_stream=True)
                    check_model(body, self._frontend)
                    request = await loop.run_in_executor(
                        self._tokenizing, body.to_request, request_id, self._frontend
                    )
                    record.accepted(request)
                    async with aclosing(self._answering.answer(live, request)) as updates:
                        if not body.stream:
                            return await self._whole(body, request, updates, record)
                        await self._write_pieces(stream, body, request, updates, record)
        except Exception as error:
            if stream.response is None:
                raise
            await stream.write([error_body(for_client(error, http.path))])
        return await stream.end()

    async def _whole(
        self,
        body: ChatBody | CompletionsBody,
        request: Request,
        updates: AsyncGenerator[RequestUpdate, None],
        record: RequestRecord,
    ) -> web.Response:
        builder = OutputBuilder(request, self._frontend)
        async for update in updates:
            record.took(update.index, update)
            builder.push(update)
        answer = answer_body(
            body,
            builder.output(),
            model=self._frontend.served_model_name,
            token_bytes=self._frontend.tokenizer.token_bytes,
        )
        return web.json_response(answer, headers={REQUEST_ID_HEADER: request.request_id})

    async def _write_pieces(
        self,
        stream: "EventStream",
        body: ChatBody | CompletionsBody,
        request: Request,
        updates: AsyncGenerator[RequestUpdate, None],
        record: RequestRecord,
    ) -> None:
        builder = OutputBuilder(request, self._frontend)
        chunks = Chunks(
            body,
            request.request_id,
            model=self._frontend.served_model_name,
            token_bytes=self._frontend.tokenizer.token_bytes,
        )
        opening = chunks.opening(request.params.n)
        async for update in updates:
            record.took(update.index, update)
            await stream.write(opening + chunks.piece(builder.part(update, builder.push(update))))
            opening = []
        await stream.write(chunks.usage(builder.output()))


class EventStream:
    """Server-sent events. Headers go out with the first: what is refused before has a status of its own."""

    def __init__(self, http: web.Request, request_id: str) -> None:
        self._http = http
        self._request_id = request_id
        self.response: web.StreamResponse | None = None
        """Once the headers are sent."""

    async def write(self, chunks: Sequence[dict[str, Any]]) -> None:
        """One event each; waits for a client that reads slowly. One that has gone cancels the call."""
        if self.response is None:
            self.response = await self._opened()
        if not chunks:
            return
        try:
            await self.response.write(b"".join(map(event, chunks)))
        except ConnectionError as error:
            raise asyncio.CancelledError from error

    async def end(self) -> web.StreamResponse:
        response = self.response or await self._opened()
        await response.write(DONE)
        await response.write_eof()
        return response

    async def _opened(self) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                REQUEST_ID_HEADER: self._request_id,
            }
        )
        await response.prepare(self._http)
        return response


async def json_object(http: web.Request) -> dict[str, Any]:
    """The body. Errors: InvalidRequestError when it is no JSON object.

    A page in a browser may send text or forms anywhere; only JSON asks the server first whether it may.
    """
    if http.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(
            reason=f"Content-Type is {shown(http.content_type)}; it must be application/json"
        )
    content = await http.read()
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not JSON: {error}", field="body") from error
    if not isinstance(found, dict):
        raise InvalidRequestError(
            f"the body holds a {type(found).__name__}; it must hold one JSON object", field="body"
        )
    return found


def _request_id(http: web.Request) -> str:
    """The client's, or a new one."""
    given = http.headers.get(REQUEST_ID_HEADER)
    if given is None:
        return uuid.uuid4().hex
    if not given or len(given) > _MAX_REQUEST_ID or not (given.isascii() and given.isprintable()):
        raise InvalidRequestError(
            f"{REQUEST_ID_HEADER} is {shown(given)}; it must be 1 to {_MAX_REQUEST_ID} printable ASCII "
            "characters",
            field=REQUEST_ID_HEADER,
        )
    return given


def _timeout_s(http: web.Request) -> float:
    given = http.headers.get(TIMEOUT_HEADER)
    if given is None:
        return math.inf
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequestError(
            f"{TIMEOUT_HEADER} is {shown(given)}; it must be a number of seconds > 0", field=TIMEOUT_HEADER
        )
    return seconds
