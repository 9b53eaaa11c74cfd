"""What a checkpoint's generation_config.json says about sampling and the end of a stream."""

from collections.abc import Mapping
from typing import Any

import msgspec

from actors.sampling_params import PARAMETERS, SamplingParams
from kernels_integration.errors import CheckpointError, InvalidRequestError, shown

_MAX_TOKEN_ID = 2**31 - 1


def eos_token_ids(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None
) -> tuple[int, ...]:
    """All that generation_config.json, config.json and the tokenizer name as ends of a stream, as in vLLM: a
    file that an export left behind must not make the model run on.

    Errors: CheckpointError when one is no token id.
    """
    found: list[int] = []
    for file, fields in {"generation_config.json": generation, "config.json": config}.items():
        value = fields.get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _MAX_TOKEN_ID for i in ids):
            raise CheckpointError(
                f"{file}: eos_token_id is {shown(value)}; it must be null, an integer >= 0 or a list of them"
            )
        found += ids
    if tokenizer_eos is not None:
        found.append(tokenizer_eos)
    return tuple(dict.fromkeys(found))


def default_sampling_params(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """The file's values under SamplingParams' names; max_new_tokens sets max_tokens.

    Errors: CheckpointError when one is out of range.
    """
    defaults = {
        name: generation[name]
        for name, parameter in PARAMETERS.items()
        if parameter.from_checkpoint and generation.get(name) is not None
    }
    if generation.get("max_new_tokens") is not None:
        defaults["max_tokens"] = generation["max_new_tokens"]
    try:
        params = SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise CheckpointError(
            f"generation_config.json: {error}. Correct the file, or serve without its sampling parameters by "
            "--generation-config vllm"
        ) from error
    given = msgspec.structs.asdict(params)
    return {name: given[name] for name in defaults}
