"""vllm.grpc.engine.VllmEngine over one group.

A request's life here: parameters -> frontend (tokenise, validate, seed) -> group.generate -> Answer ->
the wire. A call that ends in any way but its last update closes the group's iterator, which aborts.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from functools import partial

import grpc
import msgspec
from google.protobuf.message import Message
from grpc import aio
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.config import GroupConfig
from actors.requests import Request
from cluster.answering.choices import choices
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway import parameters, server_facts
from cluster.gateway.answers import Answer
from cluster.gateway.group import Group
from cluster.gateway.health import GroupHealth
from cluster.gateway.hold_back import HoldBack
from cluster.gateway.live_requests import LiveRequest, LiveRequests
from cluster.gateway.loads import Loads
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.options import require_message_fits
from cluster.gateway.request_record import RequestRecord, recorded
from cluster.gateway.statuses import errors_as_status
from cluster.gateway.tokenizer_bundle import TokenizerBundle
from cluster.report.kv_report import group_kv_bytes_per_token
from kernels_integration.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
)

logger = logging.getLogger(__name__)

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
REQUEST_ID_KEY = "latentray-request-id"
SEED_KEY = "latentray-seed"
PARAMETERS_KEY = "latentray-sampling-params"
"""Initial metadata of Generate: the id (drawn here when the request has none), the effective seed, and the
effective numbers and switches among the sampling parameters, as JSON."""
KV_BYTES_KEY = "latentray-kv-bytes-per-token"
"""Initial metadata of GetServerInfo, whose message has no field for it."""
STATS_KEY = "latentray-stats"
"""Initial metadata of GetLoads: the group's GroupStats as JSON; the message has no fields for them."""
_MAX_SHOWN_ID = 1024
_LONG_TEXT = 8192
"""Characters; a few milliseconds of tokenising."""


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Every RPC of the service; those of later features answer UNIMPLEMENTED at once."""

    def __init__(
        self,
        *,
        frontend: ModelFrontend,
        group: Group,
        config: GroupConfig,
        health: GroupHealth,
        max_message_bytes: int,
    ) -> None:
        self._frontend = frontend
        self._group = group
        self._config = config
        self._health = health
        self._max_message_bytes = max_message_bytes
        self.live = LiveRequests()
        self.metrics = GatewayMetrics(group, config.served_model_name, config.max_model_len)
        self.loads = Loads(group, self.live, config)
        self._model_info = server_facts.model_info(config, frontend)
        self._kv_bytes_per_token = group_kv_bytes_per_token(config)
        self._bundle: TokenizerBundle | None = None
        self._started_at_s = time.monotonic()
        self._last_received_at_s = 0.0

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: aio.ServicerContext
    ) -> None:
        async with errors_as_status(context, "Generate"):
            self._last_received_at_s = time.time()
            request_id = request.request_id or f"generate-{uuid.uuid4().hex}"
            with recorded(request_id, self.metrics, context.time_remaining) as record:
                _require_time_left(context)
                if self._health.draining:
                    raise UnavailableError(
                        "the server is draining and takes no new requests; ask another one"
                    )
                live = LiveRequest()
                work = self._generate(request_id, request, live, record, context)
                await self.live.run(request_id, live, work)

    async def _generate(
        self,
        request_id: str,
        message: pb.GenerateRequest,
        live: LiveRequest,
        record: RequestRecord,
        context: aio.ServicerContext,
    ) -> None:
        """Runs as a task that is cancelled with the call: by the client, its deadline, Abort or the drain."""
        request = await self._validated(request_id, message, context.invocation_metadata() or ())
        record.accepted(request)
        live.num_prompt_tokens = len(request.prompt_token_ids)
        await context.send_initial_metadata(_metadata(request))
        parts = choices(request)
        writing = asyncio.Lock()  # a stream takes one message at a time

        async def answer(index: int) -> None:
            part = parts[index]
            answer = Answer(part, index=index, stream=message.stream, hold_back=self._hold_back(part))
            async with aclosing(self._group.generate(part)) as updates:
                async for update in updates:
                    record.took(index, update)
                    live.answered = True
                    for response in answer.messages(update):
                        async with writing:
                            await self._write(response, context)

        if len(parts) == 1:
            await answer(0)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(parts)):
                    tasks.create_task(answer(index))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _validated(
        self, request_id: str, message: pb.GenerateRequest, metadata: Iterable[tuple[str, str | bytes]]
    ) -> Request:
        require_message_fits(
            "the request", message.ByteSize(), self._max_message_bytes, "send a shorter prompt"
        )
        params = parameters.sampling_params(message.sampling_params)
        prompt = parameters.prompt(message)
        build = partial(
            self._frontend.build_request,
            request_id,
            prompt,
            params,
            priority=parameters.priority_of(metadata),
            cache_salt=parameters.cache_salt_of(metadata),
        )
        if isinstance(prompt, str) and len(prompt) > _LONG_TEXT:
            # The other streams must not wait for it; `tokenizers` runs without the interpreter's lock.
            return await asyncio.to_thread(build)
        return build()

    def _hold_back(self, request: Request) -> HoldBack | None:
        params = request.params
        if not params.stop:
            return None
        return HoldBack(
            self._frontend.tokenizer.backend, params.stop, skip_special_tokens=params.skip_special_tokens
        )

    async def _write(self, message: pb.GenerateResponse, context: aio.ServicerContext) -> None:
        require_message_fits(
            "the answer", message.ByteSize(), self._max_message_bytes, "ask with stream = true"
        )
        await context.write(message)

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends the requests' Generate calls with CANCELLED, whether or not the group still answers."""
        async with errors_as_status(context, "Abort"):
            self.live.end(request.request_ids, AbortedError("the request was ended by Abort"))
            # An id that is not live here may be another gateway's.
            await self._group.abort(request.request_ids)
        return pb.AbortResponse()

    async def HealthCheck(  # noqa: N802
        self, request: pb.HealthCheckRequest, context: aio.ServicerContext
    ) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=self._health.serving, message=self._health.message)

    async def GetModelInfo(  # noqa: N802
        self, request: pb.GetModelInfoRequest, context: aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        return self._model_info

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        await context.send_initial_metadata(((KV_BYTES_KEY, str(self._kv_bytes_per_token)),))
        info = server_facts.server_info(self._config)
        info.active_requests = len(self.live)
        info.is_paused = self._health.draining
        info.last_receive_timestamp = self._last_received_at_s
        info.uptime_seconds = time.monotonic() - self._started_at_s
        return info

    async def GetLoads(  # noqa: N802
        self, request: pb.GetLoadsRequest, context: aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        async with errors_as_status(context, "GetLoads"):
            if request.HasField("dp_rank") and request.dp_rank != 0:
                raise InvalidRequestError(
                    f"dp_rank is {request.dp_rank}; this server has one group, with rank 0", field="dp_rank"
                )
            if self._group.stats is not None:
                stats = msgspec.json.encode(self._group.stats).decode()
                await context.send_initial_metadata(((STATS_KEY, stats),))
            return self.loads.response()

    async def GetTokenizer(  # noqa: N802
        self, request: common_pb2.GetTokenizerRequest, context: aio.ServicerContext
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        async with errors_as_status(context, "GetTokenizer"):
            if self._bundle is None:
                files = self._frontend.tokenizer.files
                self._bundle = await asyncio.to_thread(TokenizerBundle, files)
            for chunk in self._bundle.chunks():
                yield chunk

    # The generated base answers UNIMPLEMENTED too, but with a traceback in the log for each call.
    async def _not_built(self, request: Message, context: aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.UNIMPLEMENTED,
            f"{type(request).__name__} is not served by latentray yet",
        )

    Embed = FlushCache = StartProfile = StopProfile = SubscribeKvEvents = _not_built


def _require_time_left(context: aio.ServicerContext) -> None:
    """Errors: DeadlineExceededError when the deadline has passed. One that comes later cancels the call."""
    remaining_s: float | None = context.time_remaining()
    if remaining_s is not None and remaining_s <= 0:
        raise DeadlineExceededError("the deadline had passed when the request arrived; allow more time")


def _metadata(request: Request) -> tuple[tuple[str, str], ...]:
    params = msgspec.structs.asdict(request.params) | {"seed": request.seed}
    # Lists could outgrow what a client takes as metadata, and are not changed here anyway.
    numbers = {name: value for name, value in params.items() if isinstance(value, int | float)}
    told = ((SEED_KEY, str(request.seed)), (PARAMETERS_KEY, msgspec.json.encode(numbers).decode()))
    # Metadata is printable ASCII of 8 KiB at most; an id that does not fit is known to its sender anyway.
    request_id = request.request_id
    shown = len(request_id) <= _MAX_SHOWN_ID and request_id.isascii() and request_id.isprintable()
    return (*told, (REQUEST_ID_KEY, request_id)) if shown else told
