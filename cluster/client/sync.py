"""The blocking client. Safe to share between threads."""

from collections.abc import Iterable, Iterator, Sequence
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


class Client:
    """A server at `target` ("host:port").

    decode: make text of the answers, with the tokenizer that the server sends once; False saves that.
    timeout_s: of every call but `generate`, which has its own. credentials: API key and TLS.
    Errors: ConfigError for a blank target.
    Errors of every call: the LatentrayError that the server raised; UnavailableError when none is
    there. Nothing is retried: a caller knows better whether a request may run twice.
    """

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
        self._channel = credentials.channel(target)
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
    ) -> Iterator[Piece]: ...

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
    ) -> Completion: ...

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
    ) -> Iterator[Piece] | Completion:
        """Answer a prompt (text, or token ids taken as they are), as pieces or whole.

        `changes` are sampling parameters by keyword. request_id: for `abort`; drawn when None. priority: who
        is lower is served first, under --scheduling-policy priority. cache_salt: cached prefixes are shared
        with requests of the same salt alone.
        Leaving the iteration early ends the request on the server.
        """
        params = wire.merged_params(params, changes)
        request = wire.generate_request(request_id, prompt, params, stream=stream)
        metadata = (*self._metadata, *wire.generate_metadata(priority, cache_salt))
        if stream:
            return self._pieces(request, params, timeout_s, metadata)
        return self._completion(request, params, timeout_s, metadata)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests: their streams raise AbortedError. Unknown ids are no error."""
        self._call(self._stub.Abort, pb.AbortRequest(request_ids=request_ids))

    def health(self) -> Health:
        message = self._call(self._stub.HealthCheck, pb.HealthCheckRequest())
        return Health(healthy=message.healthy, message=message.message)

    def model_info(self) -> ModelInfo:
        return ModelInfo.from_message(self._call(self._stub.GetModelInfo, pb.GetModelInfoRequest()))

    def server_info(self) -> ServerInfo:
        message, call = self._call(self._stub.GetServerInfo.with_call, pb.GetServerInfoRequest())
        told = call.initial_metadata()
        return ServerInfo.from_message(
            message, wire.kv_bytes_per_token_of(told), wire.actors_by_node_of(told)
        )

    def loads(self) -> tuple[Load, ...]:
        """One per group behind the server."""
        message, call = self._call(self._stub.GetLoads.with_call, pb.GetLoadsRequest())
        stats = wire.stats_of(call.initial_metadata(), len(message.loads))
        return tuple(map(Load.from_message, message.loads, stats))

    def tokenizer(self) -> Tokenizer:
        """The server's tokenizer; `.backend` is the `tokenizers.Tokenizer`. Fetched once."""
        if self._tokenizer is None:
            self._eos_token_ids = self.model_info().eos_token_ids
            call = self._stub.GetTokenizer(
                common_pb2.GetTokenizerRequest(), timeout=self._timeout_s, metadata=self._metadata
            )
            self._tokenizer = tokenizer_download.from_chunks(list(self._checked(call)))
        return self._tokenizer

    def close(self) -> None:
        """Close the connection; live streams of this client end, on the server too."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _pieces(
        self,
        request: pb.GenerateRequest,
        params: SamplingParams,
        timeout_s: float | None,
        metadata: wire.Metadata,
    ) -> Iterator[Piece]:
        reader = self._reader(params)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            for response in self._checked(call):
                yield reader.piece(response, wire.seed_of(call.initial_metadata()))
        finally:
            call.cancel()

    def _completion(
        self,
        request: pb.GenerateRequest,
        params: SamplingParams,
        timeout_s: float | None,
        metadata: wire.Metadata,
    ) -> Completion:
        reader = self._reader(params)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            responses = list(self._checked(call))
        finally:
            call.cancel()
        return reader.completion(request.request_id, responses, wire.seed_of(call.initial_metadata()))

    def _reader(self, params: SamplingParams) -> CallReader:
        tokenizer = self.tokenizer().backend if self._decode else None
        return CallReader(params, tokenizer, self._eos_token_ids)

    def _call(self, method: Any, message: Any) -> Any:
        try:
            return method(message, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.to_error(error, self.target) from None

    def _checked(self, responses: Iterable[T]) -> Iterator[T]:
        try:
            yield from responses
        except grpc.RpcError as error:
            raise wire.to_error(error, self.target) from None
