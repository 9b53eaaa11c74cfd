"""Requests to messages, statuses to errors."""

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import grpc
import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.rpc import error_details_pb2, status_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.parameter_kinds import is_text
from actors.sampling_params import PARAMETERS, SamplingParams, Wire
from actors.stats import GroupStats
from actors.structured_outputs import StructuredOutputs
from cluster.errors import from_code
from kernels_integration.errors import (
    AbortedError,
    ConfigError,
    DeadlineExceededError,
    DuplicateRequestError,
    InvalidRequestError,
    LatentrayError,
    OverloadedError,
    UnavailableError,
    shown,
)

PRIORITY_KEY = "latentray-priority"
CACHE_SALT_KEY = "latentray-cache-salt-bin"
"""Metadata that a Generate call brings."""
SEED_KEY = "latentray-seed"
"""Initial metadata of Generate: the effective seed."""
STATS_KEY = "latentray-stats"
"""Initial metadata of GetLoads."""
KV_BYTES_KEY = "latentray-kv-bytes-per-token"
ACTORS_KEY = "latentray-actors-by-node"
"""Initial metadata of GetServerInfo."""
Metadata: TypeAlias = tuple[tuple[str, str | bytes], ...]
_SCHEMES = ("dns:", "ipv4:", "ipv6:", "unix:", "unix-abstract:", "vsock:", "xds:")
_RANGES = {
    FieldDescriptor.TYPE_INT32: range(-(2**31), 2**31),
    FieldDescriptor.TYPE_UINT32: range(2**32),
}
"""Whole numbers that a field of the message holds; SamplingParams allows more."""
_BY_STATUS: dict[grpc.StatusCode, type[LatentrayError]] = {
    grpc.StatusCode.CANCELLED: AbortedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.ALREADY_EXISTS: DuplicateRequestError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
}


def check_target(target: str) -> str:
    """The target; of a wrong one gRPC itself would only say that nobody answers. Errors: ConfigError.

    Targets of gRPC with a scheme (unix:/path, dns:///host:port) are left to it.
    """
    host, _, port = target.rpartition(":")
    is_address = bool(host.strip()) and port.isascii() and port.isdigit() and 0 < int(port) < 2**16
    if not is_address and not target.startswith(_SCHEMES):
        raise ConfigError(
            f"server is {target!r}; it must be HOST:PORT of a running server, such as 127.0.0.1:50051"
        )
    return target


def merged_params(params: SamplingParams | None, changes: dict[str, Any]) -> SamplingParams:
    """`params` with keyword arguments over them. Errors: InvalidRequestError."""
    legal = SamplingParams.__struct_fields__
    for name in changes:
        if name not in legal:
            raise InvalidRequestError(
                f"{name} is no sampling parameter; they are {', '.join(legal)}", field=name
            )
    return msgspec.structs.replace(params or SamplingParams(), **changes)


def generate_request(
    request_id: str | None, prompt: str | Sequence[int], params: SamplingParams, *, stream: bool
) -> pb.GenerateRequest:
    """Errors: InvalidRequestError for what the message cannot hold; all else is judged by the server."""
    request = pb.GenerateRequest(
        request_id=request_id or uuid.uuid4().hex, sampling_params=_to_message(params), stream=stream
    )
    if isinstance(prompt, str):
        request.text = prompt
        return request
    request.tokenized.SetInParent()  # an empty list is an empty prompt, not a missing one
    try:
        request.tokenized.input_ids.extend(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"prompt is {prompt!r:.200}; it must be text or a list of token ids", field="prompt"
        ) from error
    return request


def _to_message(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams()
    for name, row in PARAMETERS.items():
        value = getattr(params, name)
        if row.wire is Wire.NONE and value != row.default:
            raise InvalidRequestError(
                f"{name} is {shown(value)}, which the gRPC protocol has no field for; "
                "leave it out, use logit_bias, or run the model in this process (LLM)",
                field=name,
            )
        if row.wire in (Wire.FIELD, Wire.ZERO_IS_UNSET) and value is not None:
            _set_field(message, name, value)
    if params.structured_outputs is not None:
        _set_constraint(message, params.structured_outputs)
    return message


def _set_constraint(message: pb.SamplingParams, constraint: StructuredOutputs) -> None:
    match constraint.kind:
        case "json":
            message.json_schema = constraint.text
        case "json_object":
            message.json_object = True
        case "choice":
            message.choice.choices.extend(json.loads(constraint.text))
        case kind:
            setattr(message, kind, constraint.text)


def _set_field(message: pb.SamplingParams, name: str, value: Any) -> None:
    """Errors: InvalidRequestError for whole numbers that the field does not hold."""
    field = message.DESCRIPTOR.fields_by_name[name]
    is_map = isinstance(value, dict)
    legal = _RANGES.get(field.message_type.fields_by_name["key"].type if is_map else field.type)
    numbers = value if isinstance(value, tuple | dict) else (value,)
    if legal is not None and not all(number in legal for number in numbers):
        raise InvalidRequestError(
            f"{name} is {shown(value)}; over gRPC numbers must be from {legal[0]} to {legal[-1]}", field=name
        )
    if is_map:
        getattr(message, name).update(value)
    elif isinstance(value, tuple):
        getattr(message, name).extend(value)
    else:
        setattr(message, name, value)


def generate_metadata(priority: int, cache_salt: str | None) -> Metadata:
    """What a request states outside its message. Errors: InvalidRequestError for what cannot travel."""
    metadata: list[tuple[str, str | bytes]] = [(PRIORITY_KEY, str(priority))] if priority else []
    if cache_salt is not None:
        if not is_text(cache_salt):
            raise InvalidRequestError(
                f"cache_salt is {cache_salt!r:.200}; it must be text", field="cache_salt"
            )
        metadata.append((CACHE_SALT_KEY, cache_salt.encode()))
    return tuple(metadata)


def seed_of(metadata: Iterable[tuple[str, str | bytes]]) -> int | None:
    """The effective seed of a request, if the server says it."""
    return _whole_number_of(metadata, SEED_KEY)


def kv_bytes_per_token_of(metadata: Iterable[tuple[str, str | bytes]]) -> int | None:
    """Of a server's KV cache, if it says it."""
    return _whole_number_of(metadata, KV_BYTES_KEY)


def actors_by_node_of(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    """Where a server's groups run; empty from one that does not say it."""
    told = next((value for key, value in metadata if key == ACTORS_KEY), "{}")
    return msgspec.json.decode(told, type=dict[str, str])


def stats_of(metadata: Iterable[tuple[str, str | bytes]], num_groups: int) -> list[GroupStats | None]:
    """Of each of a server's groups, if it says them; figures that this client does not know are left out."""
    told = [msgspec.json.decode(v, type=GroupStats | None) for key, v in metadata if key == STATS_KEY]
    return told if len(told) == num_groups else [None] * num_groups


def _whole_number_of(metadata: Iterable[tuple[str, str | bytes]], name: str) -> int | None:
    return next((int(value) for key, value in metadata if key == name), None)


def to_error(error: grpc.RpcError, target: str) -> LatentrayError:
    """The error that the server raised, by its details; without any, by the status."""
    message = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            return _from_details(status_pb2.Status.FromString(value))
    status = error.code()
    if status is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(
            f"no server can be reached at {target} ({message}); start one with `latentray serve`, "
            "or check host and port"
        )
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in message:
        # gRPC's own words for a message far beyond the server's limit; no retry helps.
        return InvalidRequestError(
            f"{message}; shorten the request, or raise --max-message-size of the server", field="message"
        )
    return _BY_STATUS.get(status, LatentrayError)(f"{status.name}: {message}")


def _from_details(status: status_pb2.Status) -> LatentrayError:
    info = error_details_pb2.ErrorInfo()
    for detail in status.details:
        if detail.Unpack(info):
            return from_code(info.reason.lower(), status.message, field=info.metadata.get("field", ""))
    return LatentrayError(status.message)
