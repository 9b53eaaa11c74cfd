"""/v1/chat/completions and /v1/completions: a body, its request, its answer whole or in pieces."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from aiohttp import web

from actors.requests import Request, RequestUpdate
from cluster.access.principal import current_principal
from cluster.answering.answering import Answering
from cluster.errors import for_client
from cluster.frontend.front_end import ModelFrontend
from cluster.frontend.tenant import TENANT_HEADER, checked_tenant
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.options import WRITE_TIMEOUT_S
from cluster.gateway.request_record import RequestRecord, recorded
from cluster.http.errors import DONE, REQUEST_ID_HEADER, event, request_id_of
from cluster.http.refusals import IS_RECORDED
from cluster.http.request_body import BodyReader
from cluster.openai.bodies import Body, check_model, parse_body
from cluster.openai.endpoints import AnswerStream, streamed_answer, whole_answer
from cluster.outputs import OutputBuilder
from kernels_integration.errors import InvalidRequestError, LatentrayError, shown

TIMEOUT_HEADER = "X-Request-Timeout"
"""Seconds that the client will wait."""
_TOKENIZING_THREADS = 2

Updates = AsyncGenerator[tuple[int, RequestUpdate], None]
"""(position of the request, an update of it)."""


class Completions:
    """Answers the two endpoints. A client that goes away cancels its handler, which ends its request."""

    def __init__(
        self, *, frontend: ModelFrontend, answering: Answering, metrics: GatewayMetrics, bodies: BodyReader
    ) -> None:
        self._bodies = bodies
        self._frontend = frontend
        self._answering = answering
        self._metrics = metrics
        self._tokenizing = ThreadPoolExecutor(_TOKENIZING_THREADS, thread_name_prefix="http-tokenizing")

    async def answer(self, http: web.Request) -> web.StreamResponse:
        """Errors: those of the body and of Answering; what fails later is told inside the stream."""
        request_id = request_id_of(http)
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + _timeout_s(http)

        def time_left_s() -> float | None:
            return None if math.isinf(ends_at) else ends_at - loop.time()

        stream = EventStream(http, request_id)
        try:
            with recorded(request_id, self._metrics, time_left_s) as record:
                http[IS_RECORDED] = True
                principal = current_principal()
                async with self._answering.admit(
                    request_id,
                    principal=principal,
                    client=http.remote or "",
                    tenant=principal.tenant or checked_tenant(http.headers.get(TENANT_HEADER, "")),
                    time_left_s=time_left_s(),
                ) as live:
                    body = parse_body(http.path, await self._bodies.json_object(http), may_stream=True)
                    check_model(body.model, self._frontend)
                    requests = await loop.run_in_executor(
                        self._tokenizing, body.to_requests, request_id, self._frontend
                    )
                    record.accepted(*requests)
                    async with aclosing(self._answering.answer_all(live, requests)) as updates:
                        if not body.stream:
                            return await self._whole(body, requests, updates, record)
                        await self._write_pieces(stream, body, requests, updates, record)
        except Exception as error:
            if stream.response is None:
                raise
            await stream.fail(for_client(error, http.path))
        return await stream.end()

    async def _whole(
        self, body: Body, requests: Sequence[Request], updates: Updates, record: RequestRecord
    ) -> web.Response:
        builders = [OutputBuilder(request, self._frontend) for request in requests]
        async for position, update in updates:
            record.took(_choice(requests, position, update), update)
            builders[position].push(update)
        answer = whole_answer(body, builders, self._frontend)
        return web.json_response(answer)

    async def _write_pieces(
        self,
        stream: "EventStream",
        body: Body,
        requests: Sequence[Request],
        updates: Updates,
        record: RequestRecord,
    ) -> None:
        answer = stream.answer = streamed_answer(body, requests, self._frontend)
        opening = answer.opening()
        async for position, update in updates:
            record.took(_choice(requests, position, update), update)
            await stream.write(opening + answer.push(position, update))
            opening = []
        await stream.write(answer.closing())


def _choice(requests: Sequence[Request], position: int, update: RequestUpdate) -> int:
    """Whose update it is, counted through all requests."""
    return sum(request.params.n for request in requests[:position]) + update.index


class EventStream:
    """Server-sent events. Headers go out with the first: what is refused before has a status of its own."""

    def __init__(self, http: web.Request, request_id: str) -> None:
        self._http = http
        self._request_id = request_id
        self.response: web.StreamResponse | None = None
        """Once the headers are sent."""
        self.answer: AnswerStream | None = None
        """What is written, once it is known."""

    async def write(self, chunks: Sequence[dict[str, Any]]) -> None:
        """One event each; waits for a client that reads slowly. One that has gone cancels the call."""
        if self.response is None:
            self.response = await self._opened()
        if not chunks:
            return
        try:
            named = self.answer is not None and self.answer.names_events
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self.response.write(b"".join(event(chunk, named=named) for chunk in chunks))
        except (ConnectionError, TimeoutError) as error:
            raise asyncio.CancelledError from error

    async def fail(self, error: LatentrayError) -> None:
        """Tell what has ended the stream."""
        assert self.answer is not None
        await self.write(self.answer.failed(error))

    async def end(self) -> web.StreamResponse:
        response = self.response or await self._opened()
        if self.answer is None or not self.answer.names_events:
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
