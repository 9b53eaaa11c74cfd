"""What a checkpoint's generation_config.json says about sampling and the end of a stream."""

from collections.abc import Mapping
from typing import Any

import msgspec

from actors.sampling_params import SamplingParams
from kernels_integration.errors import CheckpointError, InvalidRequestError

_DEFAULTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters that the file may set, as in vLLM; max_new_tokens sets max_tokens."""


def eos_token_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None
) -> tuple[int, ...]:
    """generation_config.json lists all ends of a stream; without it, config.json, then the tokenizer."""
    for found in (generation.get("eos_token_id"), config.get("eos_token_id"), tokenizer_eos):
        if isinstance(found, int):
            return (found,)
        if isinstance(found, list) and found:
            return tuple(found)
    return ()


def default_sampling_params(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """The file's values under SamplingParams' names. Errors: CheckpointError when one is out of range."""
    defaults = {name: generation[name] for name in _DEFAULTED if generation.get(name) is not None}
    if generation.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation["max_new_tokens"]
    try:
        params = SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise CheckpointError(f"generation_config.json: {error}") from error
    given = msgspec.structs.asdict(params)
    return {name: given[name] for name in defaults}
