"""What a request may ask for of one model: token ids of its vocabulary, lengths within its context."""

from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from actors.parameter_kinds import all_whole
from actors.sampling_params import SamplingParams
from kernels_integration.errors import ContextLengthError, InvalidRequestError, shown


def require_token_ids(token_ids: Collection[Any], field: str, *, vocab_size: int, model: str) -> None:
    """Errors: InvalidRequestError that shows the first of them that is no id of the vocabulary.

    Linear, and quick while all is right: the caller bounds the number first.
    """
    if all_whole(token_ids) and min(token_ids, default=0) >= 0 and max(token_ids, default=0) < vocab_size:
        return
    wrong = next(token for token in token_ids if not all_whole((token,)) or not 0 <= token < vocab_size)
    raise InvalidRequestError(
        f"{field} holds {shown(wrong)}; token ids of {model} are whole numbers from 0 to {vocab_size - 1}",
        field=field,
    )


def with_fitting_length(
    params: SamplingParams, *, num_prompt_tokens: int, max_model_len: int, default_max_tokens: int | None
) -> SamplingParams:
    """The one rule of completions' lengths: a max_tokens that is given must fit behind the prompt; where none
    is, the completion may have default_max_tokens, or what the context leaves if that is less (None: all).

    Errors: ContextLengthError.
    """
    room = max_model_len - num_prompt_tokens
    for field in ("max_tokens", "min_tokens"):
        asked = getattr(params, field)
        if asked is not None and asked > room:
            raise ContextLengthError(
                f"{field} is {asked}; the prompt has {num_prompt_tokens} tokens, which leaves room for "
                f"{room} of max_model_len {max_model_len}: use at most {room}, or shorten the prompt"
                + ("; left out, it is as many as fit" if field == "max_tokens" else ""),
                field=field,
            )
    if params.max_tokens is None and default_max_tokens is not None:
        return replace(params, max_tokens=min(default_max_tokens, room))
    return params
