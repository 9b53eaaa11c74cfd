"""The asyncio client: `Client` with awaits. One event loop owns it."""

from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, overload

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.sampling_params import SamplingParams
from cluster.client import tokenizer_download, wire
from cluster.client.credentials import Credentials
from cluster.client.reader import CallReader
from cluster.client.results import Completion, Health, Load, ModelInfo, Piece, ServerInfo
from cluster.tokenizer.tokenizer import Tokenizer

T = TypeVar("T")


class AsyncClient:
    """A server at `target` ("host:port"); see `Client` for arguments and errors."""

    def __init__(
        self,
        target: str,
        *,
        decode: bool = True,
        timeout_s: float = 30.0,
        credentials: Credentials | None = None,
    ) -> None:
        self.target = wire.check_target(target)
        credentials = credentials or Credentials()
        self._metadata = credentials.metadata
        self._decode = decode
        self._timeout_s = timeout_s
        self._channel = credentials.aio_channel(target)
        self._stub = vllm_engine_pb2_grpc.VllmEngineStub(self._channel)
        self._tokenizer: Tokenizer | None = None
        self._eos_token_ids: tuple[int, ...] = ()

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: Literal[True] = True,
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **changes: Any,
    ) -> AsyncGenerator[Piece, None]: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: Literal[False],
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **changes: Any,
    ) -> Coroutine[None, None, Completion]: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: bool = True,
        request_id: str | None = None,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **changes: Any,
    ) -> AsyncGenerator[Piece, None] | Coroutine[None, None, Completion]:
        """As `Client.generate`: iterate over pieces, or await the whole with stream=False.

        A stream that is left early ends on the server once it is closed (`contextlib.aclosing`) or collected.
        """
        params = wire.merged_params(params, changes)
        request = wire.generate_request(request_id, prompt, params, stream=stream)
        metadata = (*self._metadata, *wire.generate_metadata(priority, cache_salt))
        if stream:
            return self._pieces(request, params, timeout_s, metadata)
        return self._completion(request, params, timeout_s, metadata)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: their streams raise AbortedError. Unknown ids are no error."""
        await self._call(self._stub.Abort, pb.AbortRequest(request_ids=request_ids))

    async def health(self) -> Health:
        message = await self._call(self._stub.HealthCheck, pb.HealthCheckRequest())
        return Health(healthy=message.healthy, message=message.message)

    async def model_info(self) -> ModelInfo:
        return ModelInfo.from_message(await self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    async def server_info(self) -> ServerInfo:
        call = self._stub.GetServerInfo(
            pb.GetServerInfoRequest(), timeout=self._timeout_s, metadata=self._metadata
        )
        try:
            message = await call
        except grpc.RpcError as error:
            raise wire.to_error(error, self.target) from None
        told = await call.initial_metadata()
        return ServerInfo.from_message(
            message, wire.kv_bytes_per_token_of(told), wire.actors_by_node_of(told)
        )

    async def loads(self) -> tuple[Load, ...]:
        """One per group behind the server."""
        call = self._stub.GetLoads(pb.GetLoadsRequest(), timeout=self._timeout_s, metadata=self._metadata)
        try:
            message = await call
        except grpc.RpcError as error:
            raise wire.to_error(error, self.target) from None
        stats = wire.stats_of(await call.initial_metadata(), len(message.loads))
        return tuple(map(Load.from_message, message.loads, stats))

    async def tokenizer(self) -> Tokenizer:
        """The server's tokenizer; `.backend` is the `tokenizers.Tokenizer`. Fetched once."""
        if self._tokenizer is None:
            eos_token_ids = (await self.model_info()).eos_token_ids
            call = self._stub.GetTokenizer(
                common_pb2.GetTokenizerRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
            chunks = [chunk async for chunk in self._checked(call)]
            self._tokenizer, self._eos_token_ids = tokenizer_download.from_chunks(chunks), eos_token_ids
        return self._tokenizer

    async def close(self) -> None:
        """Close the connection; live streams of this client end, on the server too."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _pieces(
        self,
        request: pb.GenerateRequest,
        params: SamplingParams,
        timeout_s: float | None,
        metadata: wire.Metadata,
    ) -> AsyncGenerator[Piece, None]:
        reader = await self._reader(params)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            async for response in self._checked(call):
                yield reader.piece(response, wire.seed_of(await call.initial_metadata()))
        finally:
            call.cancel()

    async def _completion(
        self,
        request: pb.GenerateRequest,
        params: SamplingParams,
        timeout_s: float | None,
        metadata: wire.Metadata,
    ) -> Completion:
        reader = await self._reader(params)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            responses = [response async for response in self._checked(call)]
        finally:
            call.cancel()
        return reader.completion(request.request_id, responses, wire.seed_of(await call.initial_metadata()))

    async def _reader(self, params: SamplingParams) -> CallReader:
        tokenizer = (await self.tokenizer()).backend if self._decode else None
        return CallReader(params, tokenizer, self._eos_token_ids)

    async def _call(self, method: Any, message: Any) -> Any:
        try:
            return await method(message, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.to_error(error, self.target) from None

    async def _checked(self, responses: AsyncIterable[T]) -> AsyncGenerator[T, None]:
        try:
            async for response in responses:
                yield response
        except grpc.RpcError as error:
            raise wire.to_error(error, self.target) from None
