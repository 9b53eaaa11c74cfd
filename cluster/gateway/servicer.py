"""vllm.grpc.engine.VllmEngine over one group.

A request's life here: Answering.admit -> parameters -> frontend (tokenise, validate, seed) ->
Answering.answer -> AnswerMessages -> the wire.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from actors.stats import GroupStats
from cluster.access.principal import current_principal
from cluster.answering.answering import Answering
from cluster.answering.live_requests import LiveRequest
from cluster.frontend.front_end import ModelFrontend
from cluster.gateway import parameters, server_facts
from cluster.gateway.answers import AnswerMessages
from cluster.gateway.health import GroupHealth
from cluster.gateway.loads import Loads
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.options import WRITE_TIMEOUT_S, require_message_fits
from cluster.gateway.request_record import RequestRecord, recorded
from cluster.gateway.statuses import errors_as_status
from cluster.gateway.tokenizer_bundle import TokenizerBundle
from cluster.report.kv_report import group_kv_bytes_per_token
from kernels_integration.errors import DeadlineExceededError, InvalidRequestError

logger = logging.getLogger(__name__)

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
REQUEST_ID_KEY = "latentray-request-id"
SEED_KEY = "latentray-seed"
PARAMETERS_KEY = "latentray-sampling-params"
"""Initial metadata of Generate: the id (drawn here when the request has none), the effective seed, and the
effective numbers and switches among the sampling parameters, as JSON."""
KV_BYTES_KEY = "latentray-kv-bytes-per-token"
ACTORS_KEY = "latentray-actors-by-node"
"""Initial metadata of GetServerInfo, whose message has no fields for them. Actors: JSON, text by address."""
STATS_KEY = "latentray-stats"
"""Initial metadata of GetLoads, once for each of its loads: the group's GroupStats as JSON, null before the
first heartbeat. The message has no fields for them."""
_MAX_SHOWN_ID = 1024
_LONG_TEXT = 8192
"""Characters; a few milliseconds of tokenising."""
_TOKENIZING_THREADS = 2


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    """Every RPC of the service; those of later features answer UNIMPLEMENTED at once."""

    def __init__(
        self,
        *,
        frontend: ModelFrontend,
        answering: Answering,
        config: GroupConfig,
        health: GroupHealth,
        max_message_bytes: int,
        actors_by_node: Mapping[str, str],
    ) -> None:
        self._frontend = frontend
        self._answering = answering
        self._config = config
        self._health = health
        self._max_message_bytes = max_message_bytes
        self.metrics = GatewayMetrics(answering.groups, config.served_model_name, config.max_model_len)
        self.loads = Loads(answering.groups, answering.live, config)
        self._model_info = server_facts.model_info(config, frontend)
        self._kv_bytes_per_token = group_kv_bytes_per_token(config)
        self._actors_by_node = actors_by_node
        self._bundle: TokenizerBundle | None = None
        self._tokenizing = ThreadPoolExecutor(_TOKENIZING_THREADS, thread_name_prefix="tokenizing")
        self._started_at_s = time.monotonic()
        self._last_received_at_s = 0.0

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: aio.ServicerContext
    ) -> None:
        async with errors_as_status(context, "Generate"):
            self._last_received_at_s = time.time()
            request_id = request.request_id or f"generate-{uuid.uuid4().hex}"
            with recorded(request_id, self.metrics, context.time_remaining) as record:
                principal = current_principal()
                async with self._answering.admit(
                    request_id,
                    principal=principal,
                    client=_host_of(context.peer()),
                    tenant=principal.tenant or parameters.tenant_of(context.invocation_metadata() or ()),
                    time_left_s=context.time_remaining(),
                ) as live:
                    await self._generate(live, request, record, context)

    async def _generate(
        self,
        live: LiveRequest,
        message: pb.GenerateRequest,
        record: RequestRecord,
        context: aio.ServicerContext,
    ) -> None:
        request = await self._validated(live.request_id, message, context.invocation_metadata() or ())
        record.accepted(request)
        await context.send_initial_metadata(_metadata(request))
        answers = [AnswerMessages(request, index=i, stream=message.stream) for i in range(request.params.n)]
        async with aclosing(self._answering.answer(live, request)) as updates:
            async for update in updates:
                record.took(update.index, update)
                for response in answers[update.index].messages(update):
                    await self._write(response, context)

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
        is_long = isinstance(prompt, str) and len(prompt) > _LONG_TEXT
        if is_long or params.structured_outputs is not None:
            # The other streams must not wait for it, and only so many long texts take memory at a time.
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, build)
        return build()

    async def _write(self, message: pb.GenerateResponse, context: aio.ServicerContext) -> None:
        require_message_fits(
            "the answer", message.ByteSize(), self._max_message_bytes, "ask with stream = true"
        )
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await context.write(message)
        except TimeoutError:
            raise DeadlineExceededError(
                f"the client has read nothing of the answer for {WRITE_TIMEOUT_S:g} s; read faster"
            ) from None

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: aio.ServicerContext
    ) -> pb.AbortResponse:
        """Ends the caller's requests: their Generate calls with CANCELLED, whether or not the group still
        answers. Those of another tenant are unknown here.
        """
        async with errors_as_status(context, "Abort"):
            self._answering.abort(request.request_ids, principal=current_principal())
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
        actors = msgspec.json.encode(self._actors_by_node).decode()
        told = ((KV_BYTES_KEY, str(self._kv_bytes_per_token)), (ACTORS_KEY, actors))
        await context.send_initial_metadata(told)
        info = server_facts.server_info(self._config, len(self._answering.groups))
        info.active_requests = len(self._answering.live)
        info.is_paused = self._health.draining
        info.last_receive_timestamp = self._last_received_at_s
        info.uptime_seconds = time.monotonic() - self._started_at_s
        return info

    async def GetLoads(  # noqa: N802
        self, request: pb.GetLoadsRequest, context: aio.ServicerContext
    ) -> pb.GetLoadsResponse:
        async with errors_as_status(context, "GetLoads"):
            groups = list(self._answering.groups)
            rank = request.dp_rank if request.HasField("dp_rank") else None
            if rank is not None and not 0 <= rank < len(groups):
                raise InvalidRequestError(
                    f"dp_rank is {rank}; this server's groups have the ranks 0 to {len(groups) - 1}",
                    field="dp_rank",
                )
            asked = groups if rank is None else [groups[rank]]
            await context.send_initial_metadata(
                tuple((STATS_KEY, _stats_json(group.stats)) for group in asked)
            )
            return self.loads.response(rank)

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


def _stats_json(stats: GroupStats | None) -> str:
    """Without the queue's parts: of many tenants they would not fit into metadata."""
    return msgspec.json.encode(stats and msgspec.structs.replace(stats, queue=())).decode()


def _host_of(peer: str) -> str:
    """Who asks, whatever connection it uses: "ipv4:10.0.0.1:5123" -> "ipv4:10.0.0.1"."""
    return peer.rpartition(":")[0]


def _metadata(request: Request) -> tuple[tuple[str, str], ...]:
    params = msgspec.structs.asdict(request.params) | {"seed": request.seed}
    # Lists could outgrow what a client takes as metadata, and are not changed here anyway.
    numbers = {name: value for name, value in params.items() if isinstance(value, int | float)}
    told = ((SEED_KEY, str(request.seed)), (PARAMETERS_KEY, msgspec.json.encode(numbers).decode()))
    # Metadata is printable ASCII of 8 KiB at most; an id that does not fit is known to its sender anyway.
    request_id = request.request_id
    shown = len(request_id) <= _MAX_SHOWN_ID and request_id.isascii() and request_id.isprintable()
    return (*told, (REQUEST_ID_KEY, request_id)) if shown else told
