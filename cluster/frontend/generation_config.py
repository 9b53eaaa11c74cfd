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
    """generation_config.json lists all ends of a stream; without it, config.json, then the tokenizer.

    Errors: CheckpointError when one is no token id.
    """
    sources = {"generation_config.json": generation, "config.json": config}
    for file, fields in sources.items():
        found = fields.get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(
                f"{file}: eos_token_id is {found!r}; it must be null, an integer >= 0 or a list of them"
            )
        if ids:
            return tuple(ids)
    return () if tokenizer_eos is None else (tokenizer_eos,)


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
