"""GenerateRequest -> prompt and SamplingParams, by the presence rules of the proto.

Every field of the proto is a declared parameter or named in exactly one of the tables below (a test holds
them against the descriptor), so no parameter is ever ignored in silence. Serving one more means: delete its
row here and declare it in actors/sampling_params.py.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import Message
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.sampling_params import PARAMETERS, Parameter, SamplingParams, Wire
from actors.structured_outputs import ConstraintKind, StructuredOutputs
from cluster.frontend.tenant import checked_tenant
from kernels_integration.errors import MAX_SHOWN, InvalidRequestError


@dataclass(frozen=True, slots=True)
class Unserved:
    """A field of a message that only its neutral values are accepted for."""

    field: str
    neutral: str
    """The values that pass, in words."""
    is_neutral: Callable[[Any], bool]


def _present(field: str) -> Unserved:
    """A field with presence: asked for as soon as it is set."""
    return Unserved(field, "unset", lambda message: not message.HasField(field))


def _values(field: str, *neutral: float) -> Unserved:
    """A scalar field without presence."""
    words = " or ".join(map(str, neutral))
    return Unserved(field, words, lambda message: getattr(message, field) in neutral)


def _empty(field: str) -> Unserved:
    """A list or map."""
    return Unserved(field, "empty", lambda message: not getattr(message, field))


UNSERVED_PARAMETERS: tuple[Unserved, ...] = (_present("truncate_prompt_tokens"),)
SERVED_PARAMETERS = frozenset(
    name for name, row in PARAMETERS.items() if row.wire in (Wire.FIELD, Wire.ZERO_IS_UNSET)
)
INEFFECTIVE_PARAMETERS = {
    "spaces_between_special_tokens": "text is made by the client; the stream holds token ids",
    "grammar_from_first_token": "every constraint holds from the first token on",
}
CONSTRAINT_FIELDS: Mapping[str, ConstraintKind] = {
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_object": "json_object",
    "choice": "choice",
}
"""Of the oneof `constraint`, and what vLLM's Python interface calls each."""

UNSERVED_INPUTS: tuple[Unserved, ...] = (
    _present("kv_transfer_params"),
    _present("kv_transfer_params_json"),
    _present("mm_inputs"),
    _empty("extra_mm_inputs"),
    _present("media_refs"),
    Unserved(
        "data_parallel_rank",
        "unset or 0",
        lambda request: not request.HasField("data_parallel_rank") or request.data_parallel_rank == 0,
    ),
)
PRIORITY_KEY = "latentray-priority"
TENANT_KEY = "x-tenant"
CACHE_SALT_KEY = "latentray-cache-salt-bin"
"""Metadata of a Generate call, which the message has no fields for: a whole number, a name, UTF-8 text."""

SERVED_INPUTS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})


def prompt(request: pb.GenerateRequest) -> str | Sequence[int]:
    """The request's text, or its token ids, which nobody has looked at yet.

    Errors: InvalidRequestError when it has neither.
    """
    _refuse_unserved(request, UNSERVED_INPUTS)
    match request.WhichOneof("input"):
        case "tokenized":
            ids: Sequence[int] = request.tokenized.input_ids
            return ids
        case "text":
            return str(request.text)
    raise InvalidRequestError("the request has no input; set tokenized.input_ids or text", field="input")


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """As in vLLM's server, an unset field means the default, but unset max_tokens the context's end.

    Errors: InvalidRequestError naming the first field that is out of range or not served.
    """
    _refuse_unserved(message, UNSERVED_PARAMETERS)
    values = {name: _value_of(message, PARAMETERS[name]) for name in SERVED_PARAMETERS}
    return SamplingParams(structured_outputs=_constraint_of(message), **values)


def _constraint_of(message: pb.SamplingParams) -> StructuredOutputs | None:
    field = message.WhichOneof("constraint")
    if field is None or (field == "json_object" and not message.json_object):
        return None
    value = message.choice.choices if field == "choice" else getattr(message, field)
    constraint: StructuredOutputs = PARAMETERS["structured_outputs"].checked(
        {CONSTRAINT_FIELDS[field]: value}
    )
    return constraint


def _value_of(message: pb.SamplingParams, row: Parameter) -> Any:
    """What the field says. A list's length is judged before its entries are looked at."""
    field = pb.SamplingParams.DESCRIPTOR.fields_by_name[row.name]
    value = getattr(message, row.name)
    if field.has_presence and not message.HasField(row.name):
        return None if row.none else row.default
    if row.wire is Wire.ZERO_IS_UNSET and value == 0:
        return row.default
    if isinstance(value, Mapping):
        return {t: _decimal(v) for t, v in row.checked(value).items()} or row.default
    return _decimal(value) if isinstance(value, float) else value


def priority_of(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """0 unless the call states one. Errors: InvalidRequestError."""
    value = next((value for key, value in metadata if key == PRIORITY_KEY), "0")
    try:
        return int(value)
    except ValueError:
        raise InvalidRequestError(
            f"metadata {PRIORITY_KEY} is {_shown(value)}; it must be a whole number", field="priority"
        ) from None


def tenant_of(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """ "" unless the call states one. Errors: InvalidRequestError."""
    return checked_tenant(next((value for key, value in metadata if key == TENANT_KEY), ""))


def cache_salt_of(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """None unless the call states one. Errors: InvalidRequestError."""
    value = next((value for key, value in metadata if key == CACHE_SALT_KEY), None)
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise InvalidRequestError(
            f"metadata {CACHE_SALT_KEY} is {_shown(value)}; it must be UTF-8", field="cache_salt"
        ) from None


def _refuse_unserved(message: Any, table: Sequence[Unserved]) -> None:
    for row in table:
        if not row.is_neutral(message):
            raise InvalidRequestError(
                f"{row.field} is {_shown(getattr(message, row.field))}, which this server does not support; "
                f"supported: {row.neutral}",
                field=row.field,
            )


def _shown(value: Any) -> str:
    """A value, or its beginning, in one line; of a large message only the size."""
    if isinstance(value, Message) and value.ByteSize() > MAX_SHOWN:
        return f"a message of {value.ByteSize()} bytes"
    text = " ".join(str(value[:MAX_SHOWN] if isinstance(value, str | bytes) else value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32: 0.8 stays 0.8, so a seeded stream is that of `LLM`."""
    return float(str(np.float32(value)))
