"""What travels between a front end (gateway, LLM, batch) and a coordinator."""

from typing import Literal

import msgspec

from actors.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request: token ids inside the vocabulary, length checked, parameters legal."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """uint64: params.seed, or drawn by the front end (and reported by it)."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end the stream, unless params.ignore_eos."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: int = 0
    """Lower is served first, under the priority policy only."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """params.bad_words as token sequences, whose last token never follows the others in the completion."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log probability of one emitted token, and the best alternatives (id, value), descending."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a request (a delta) with its totals so far. The last one has a finish_reason."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    """As many as token_ids when asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """In the first update, when asked for: of the prompt's tokens but the first, which has none."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    """The stop token id or stop string that ended the stream; None for EOS and length."""
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The request ended without a result. `code` is a LatentrayError code; "aborted" after an abort."""

    request_id: str
    code: str
    message: str
