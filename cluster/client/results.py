"""What the clients return."""

import json
from dataclasses import dataclass, field
from typing import Any

from actors.requests import FinishReason, TokenLogprob
from actors.stats import GroupStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request. Draft tokens were proposed by the MTP layer, accepted ones held."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one message of a stream adds. The last one has a finish_reason and the usage, and no tokens.

    text: what is certain and cannot be part of a stop string; "" when the client does not decode.
    index: the choice of n that it belongs to; each choice has a last one.
    """

    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens but the first; in the first one of choice 0, when asked for."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    usage: Usage | None = None
    seed: int | None = None
    """On the last one: the choice's effective seed; with it and n = 1 the answer can be had again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer. seed: the effective one; with it and n = 1 the answer can be had again."""

    request_id: str
    others: tuple["Completion", ...] = ()
    """With n > 1: the choices after this first one."""
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens but the first, when asked for; not in `others`."""
    finish_reason: FinishReason
    matched_stop: int | str | None
    usage: Usage
    seed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether a token can be produced now; message says why not."""

    healthy: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The served model."""

    served_model_name: str
    model_path: str
    model_type: str
    architectures: tuple[str, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    default_sampling_params: dict[str, Any] = field(default_factory=dict)
    """What the checkpoint recommends; nothing applies it unless asked."""

    @classmethod
    def from_message(cls, message: Any) -> "ModelInfo":
        return cls(
            served_model_name=message.served_model_name,
            model_path=message.model_path,
            model_type=message.model_type,
            architectures=tuple(message.architectures),
            vocab_size=message.vocab_size,
            max_model_len=message.max_context_length,
            eos_token_ids=tuple(message.eos_token_ids),
            default_sampling_params=json.loads(message.default_sampling_params_json or "{}"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The server and its group."""

    active_requests: int
    draining: bool
    uptime_s: float
    max_num_seqs: int
    block_size: int
    dtype: str
    kv_cache_dtype: str
    kv_bytes_per_token: int | None
    """On the shard that keeps the token; None: the server does not say."""
    attention_backend: str
    actors_by_node: dict[str, str] = field(default_factory=dict)
    """By address, what of its groups runs there; empty: the server does not say."""

    @classmethod
    def from_message(
        cls, message: Any, kv_bytes_per_token: int | None, actors_by_node: dict[str, str]
    ) -> "ServerInfo":
        return cls(
            active_requests=message.active_requests,
            draining=message.is_paused,
            uptime_s=message.uptime_seconds,
            max_num_seqs=message.max_num_seqs,
            block_size=message.block_size,
            dtype=message.model_dtype,
            kv_cache_dtype=message.kv_cache_dtype,
            kv_bytes_per_token=kv_bytes_per_token,
            attention_backend=message.attention_backend,
            actors_by_node=actors_by_node,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy one group is."""

    running: int
    waiting: int
    waiting_tokens: int
    """Prompt tokens of the waiting requests."""
    used_tokens: int
    """Tokens of KV cache in use, of max_tokens."""
    max_tokens: int
    tokens_per_s: float
    stats: GroupStats | None = None
    """All its figures; None from another server, and before the group's first heartbeat."""

    @classmethod
    def from_message(cls, message: Any, stats: GroupStats | None = None) -> "Load":
        return cls(
            running=message.num_running_reqs,
            waiting=message.num_waiting_reqs,
            waiting_tokens=message.num_waiting_uncached_tokens,
            used_tokens=message.num_used_tokens,
            max_tokens=message.max_total_num_tokens,
            tokens_per_s=message.gen_throughput,
            stats=stats,
        )
