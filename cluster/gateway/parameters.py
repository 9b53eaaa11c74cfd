"""GenerateRequest -> prompt and SamplingParams, by the presence rules of the proto.

Every field of the proto is named in exactly one of the tables below (a test holds them against the
descriptor), so no parameter is ever ignored in silence. Serving one more means: delete its row,
fill it in `sampling_params`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.sampling_params import SamplingParams
from kernels_integration.errors import InvalidRequestError


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


def _false(field: str) -> Unserved:
    return Unserved(field, "false", lambda message: not getattr(message, field))


UNSERVED_PARAMETERS: tuple[Unserved, ...] = (
    _present("truncate_prompt_tokens"),
    _present("json_schema"),
    _present("regex"),
    _present("grammar"),
    _present("structural_tag"),
    _present("json_object"),
    _present("choice"),
)
SERVED_PARAMETERS = frozenset(
    {
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "max_tokens",
        "min_tokens",
        "stop",
        "stop_token_ids",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "ignore_eos",
        "logprobs",
        "prompt_logprobs",
        "seed",
    }
)
INEFFECTIVE_PARAMETERS = {
    "spaces_between_special_tokens": "text is made by the client; the stream holds token ids",
    "grammar_from_first_token": "qualifies a constraint, and constraints are refused",
}

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
CACHE_SALT_KEY = "latentray-cache-salt-bin"
"""Metadata of a Generate call, which the message has no fields for: a whole number, and UTF-8 text."""

SERVED_INPUTS = frozenset({"request_id", "tokenized", "text", "sampling_params", "stream"})


def prompt(request: pb.GenerateRequest) -> str | Sequence[int]:
    """The request's text, or its token ids. Errors: InvalidRequestError when it has neither."""
    _refuse_unserved(request, UNSERVED_INPUTS)
    match request.WhichOneof("input"):
        case "tokenized":
            return tuple(request.tokenized.input_ids)
        case "text":
            return str(request.text)
    raise InvalidRequestError("the request has no input; set tokenized.input_ids or text", field="input")


def sampling_params(message: pb.SamplingParams) -> SamplingParams:
    """Unset temperature = 1; top_p, repetition_penalty and n: 0 = unset; max_tokens unset = to the context's
    end: as in vLLM's server.

    Errors: InvalidRequestError naming the first field that is out of range or not served.
    """
    _refuse_unserved(message, UNSERVED_PARAMETERS)
    return SamplingParams(
        temperature=_decimal(message.temperature) if message.HasField("temperature") else 1.0,
        top_p=_decimal(message.top_p) if message.top_p != 0 else 1.0,
        top_k=message.top_k,
        min_p=_decimal(message.min_p),
        n=message.n or 1,
        presence_penalty=_decimal(message.presence_penalty),
        frequency_penalty=_decimal(message.frequency_penalty),
        repetition_penalty=_decimal(message.repetition_penalty) if message.repetition_penalty != 0 else 1.0,
        logit_bias={t: _decimal(v) for t, v in message.logit_bias.items()} or None,
        min_tokens=message.min_tokens,
        include_stop_str_in_output=message.include_stop_str_in_output,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        skip_special_tokens=message.skip_special_tokens,
    )


def priority_of(metadata: Iterable[tuple[str, str | bytes]]) -> int:
    """0 unless the call states one. Errors: InvalidRequestError."""
    value = next((value for key, value in metadata if key == PRIORITY_KEY), "0")
    try:
        return int(value)
    except ValueError:
        raise InvalidRequestError(
            f"metadata {PRIORITY_KEY} is {_shown(value)}; it must be a whole number", field="priority"
        ) from None


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
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def _decimal(value: float) -> float:
    """The shortest decimal that is this float32: 0.8 stays 0.8, so a seeded stream is that of `LLM`."""
    return float(str(np.float32(value)))
