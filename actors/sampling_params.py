"""Sampling parameters of a request, spelled as in vLLM. Illegal values are refused, never clamped."""

import math
from typing import Any

import msgspec

from kernels_integration.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw a completion.

    temperature: 0 is greedy; else logits are divided by it. top_k: 0 or -1 keeps all. top_p in
    (0, 1]; min_p in [0, 1] of the best token's probability. seed: None lets the front end draw one.
    max_tokens: None runs to the context's end. stop: strings that end the text before them.
    logprobs: None, or the number of best alternatives reported beside each token.

    Errors: InvalidRequestError naming field, value and legal values.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        stop: Any = self.stop  # vLLM users also write one string, a list, or None
        stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        msgspec.structs.force_setattr(self, "stop", stop)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _require(
            _is_number(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "a number from 0 (greedy) to 100",
        )
        _require(
            _is_int(self.top_k) and self.top_k >= -1,
            "top_k",
            self.top_k,
            "a whole number >= 1, or 0 or -1 for all tokens",
        )
        _require(
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "top_p",
            self.top_p,
            "a number above 0, up to 1 (1 keeps all tokens)",
        )
        _require(
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            "min_p",
            self.min_p,
            "a number from 0 (off) to 1",
        )
        _require(
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**64),
            "seed",
            self.seed,
            "a whole number of 64 bits, or None",
        )
        _require(
            self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1),
            "max_tokens",
            self.max_tokens,
            "a whole number >= 1, or None for as many as the context holds",
        )
        _require(
            self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            "logprobs",
            self.logprobs,
            f"a whole number from 0 to {MAX_LOGPROBS}, or None",
        )
        _require(
            len(self.stop) <= MAX_STOP_STRINGS
            and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
            "stop",
            self.stop,
            f"at most {MAX_STOP_STRINGS} non-empty strings of at most {MAX_STOP_LENGTH} characters",
        )
        _require(
            all(_is_int(t) and t >= 0 for t in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "token ids of the vocabulary",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _require(legal: bool, field: str, value: object, rule: str) -> None:
    if not legal:
        raise InvalidRequestError(f"{field} is {value!r}; it must be {rule}", field=field)
