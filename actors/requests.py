"""What travels between a front end (gateway, LLM, batch) and a coordinator."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from actors.sampling_params import SamplingParams
from actors.stats import PhaseTimes

FinishReason = Literal["stop", "length"]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class SequenceKey(msgspec.Struct, frozen=True, array_like=True):
    """What a front end and a coordinator call one sequence.

    The user's id does not suffice: a retry has the same, and so have the n completions of a request.
    """

    request_id: str
    incarnation: int = 0
    """Drawn by the front end anew for every call that it answers; no other front end draws the same."""
    index: int = 0
    """Of the completion, below n."""


class OfSequence(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of one sequence."""

    request_id: str
    """The user's."""
    incarnation: int = 0
    index: int = 0
    """Of SequenceKey."""

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.request_id, self.incarnation, self.index)


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a sequence came on a coordinator that is gone."""

    token_ids: tuple[TokenId, ...]
    """Of its completion, in order, those that were held too."""
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Totals, as in its updates."""


class Request(OfSequence, frozen=True, kw_only=True):
    """A validated request: token ids inside the vocabulary, length checked, parameters legal.

    With params.n > 1 it stands for n sequences, which cluster.answering.choices makes of it.
    """

    prompt_token_ids: tuple[TokenId, ...]
    params: SamplingParams
    seed: Annotated[int, Meta(ge=0)]
    """uint64: params.seed, or drawn by the front end (and reported by it)."""
    eos_token_ids: tuple[TokenId, ...]
    """Tokens that end the stream, unless params.ignore_eos."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    priority: Annotated[int, Meta(le=2**63 - 1)] = 0
    """Lower is served first, under the priority policy only."""
    tenant: str = ""
    """Whose it is, where a server divides its queues between tenants."""
    bad_words: tuple[tuple[TokenId, ...], ...] = ()
    """params.bad_words as token sequences, whose last token never follows the others in the completion."""
    progress: Progress | None = None
    """Of a sequence that goes on here; its updates hold what follows."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log probability of one emitted token, and the best alternatives (id, value), descending."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestUpdate(OfSequence, frozen=True, kw_only=True):
    """New tokens of a sequence (a delta) with its totals so far. The last one has a finish_reason."""

    token_ids: tuple[int, ...]
    num_held: int = 0
    """So many of the newest tokens may be part of a stop string that is not complete yet: who shows tokens as
    they come waits with them. 0 in the last update."""
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
    phases: PhaseTimes | None = None
    """In the last update: where the sequence's time on the coordinator went."""


class RequestFailed(OfSequence, frozen=True, kw_only=True):
    """The sequence ended without a result. `code` is a LatentrayError code; "aborted" after an abort."""

    code: str
    message: str

    @classmethod
    def of(cls, key: SequenceKey, code: str, message: str) -> "RequestFailed":
        return cls(
            request_id=key.request_id,
            incarnation=key.incarnation,
            index=key.index,
            code=code,
            message=message,
        )
