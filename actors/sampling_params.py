"""Sampling parameters of a request, spelled as in vLLM. Illegal values are refused, never clamped."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kernels_integration.errors import InvalidRequestError, shown

ALL_LOGPROBS = -1
"""A number of alternatives: the whole vocabulary."""
DEFAULT_MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = 1024
MAX_COUNT = 2**63 - 1
"""What messages between processes and the shards' arrays hold."""
MIN_REPETITION_PENALTY = 0.01
"""Below, logits divided by it leave float32's range and tie there."""


def is_text(value: object) -> bool:
    """Whether it is a str that UTF-8 can carry: JSON's lone surrogates ("\\ud800") are none."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to draw a completion. docs/sampling.md tells the order in which the filters apply.

    n: completions of the prompt; choice 0 is the one that n = 1 gives. temperature: 0 is greedy; else logits
    are divided by it. top_k: 0 or -1 keeps all. top_p in (0, 1]; min_p in [0, 1] of the best token's
    probability. presence_penalty, frequency_penalty: subtracted from the logits of tokens that the completion
    holds, once and once for each time. repetition_penalty: divides positive logits, and multiplies others, of
    tokens that prompt or completion hold; 1 is off. logit_bias: {token id: value added to its logit}.
    allowed_token_ids: nothing else is drawn. bad_words: texts of which the completion does not get the last
    token. seed: None lets the front end draw one. max_tokens: None runs to the context's end. min_tokens: no
    end before as many. stop: strings that end the text before them, or after them with
    include_stop_str_in_output. logprobs, prompt_logprobs: None, or the number of best alternatives reported
    beside each token of the completion, of the prompt; -1: all.

    Errors: InvalidRequestError naming field, value and legal values.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        self._take_vllm_spellings()
        self._check_distribution()
        self._check_rules()
        self._check_ends()
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            value = getattr(self, field)
            _require(isinstance(value, bool), field, value, "true or false")
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            _require(
                value is None or (_is_int(value) and value >= ALL_LOGPROBS),
                field,
                value,
                "a whole number >= 0, -1 for the whole vocabulary, or None",
            )

    def _take_vllm_spellings(self) -> None:
        """vLLM users also write one string, a list, None, or JSON's text keys."""
        for field in ("stop", "bad_words"):
            value = getattr(self, field)
            _set(self, field, (value,) if isinstance(value, str) else _as_tuple(field, value, "texts"))
        _set(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, "token ids"))
        if self.allowed_token_ids is not None:
            _set(
                self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids, "token ids")
            )
        if self.logit_bias is not None:
            _set(self, "logit_bias", _with_int_keys(self.logit_bias))

    def _check_distribution(self) -> None:
        _require(
            _is_int(self.n) and 1 <= self.n <= MAX_CHOICES,
            "n",
            self.n,
            f"a whole number from 1 to {MAX_CHOICES}",
        )
        _require(
            _is_number(self.temperature) and 0 <= self.temperature <= 100,
            "temperature",
            self.temperature,
            "a number from 0 (greedy) to 100",
        )
        _require(
            _is_int(self.top_k) and -1 <= self.top_k <= MAX_COUNT,
            "top_k",
            self.top_k,
            "a whole number from 1 to 2**63 - 1, or 0 or -1 for all tokens",
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

    def _check_rules(self) -> None:
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            _require(_is_number(value) and -2 <= value <= 2, field, value, "a number from -2 to 2 (0 is off)")
        _require(
            _is_number(self.repetition_penalty) and MIN_REPETITION_PENALTY <= self.repetition_penalty <= 100,
            "repetition_penalty",
            self.repetition_penalty,
            f"a number from {MIN_REPETITION_PENALTY} to 100 (1 is off)",
        )
        _require(
            self.logit_bias is None
            or all(_is_int(t) and _is_number(v) and -100 <= v <= 100 for t, v in self.logit_bias.items()),
            "logit_bias",
            self.logit_bias,
            "token ids with numbers from -100 to 100",
        )
        _require(
            self.allowed_token_ids is None
            or (len(self.allowed_token_ids) > 0 and all(map(_is_int, self.allowed_token_ids))),
            "allowed_token_ids",
            self.allowed_token_ids,
            "at least one token id of the vocabulary, or None",
        )
        _require(
            len(self.bad_words) <= MAX_BAD_WORDS
            and all(is_text(w) and w.strip() and len(w) <= MAX_STOP_LENGTH for w in self.bad_words),
            "bad_words",
            self.bad_words,
            f"at most {MAX_BAD_WORDS} texts of at most {MAX_STOP_LENGTH} characters, none of them blank",
        )

    def _check_ends(self) -> None:
        _require(
            self.max_tokens is None or (_is_int(self.max_tokens) and 1 <= self.max_tokens <= MAX_COUNT),
            "max_tokens",
            self.max_tokens,
            "a whole number >= 1 (below 2**63), or None for as many as the context holds",
        )
        _require(
            _is_int(self.min_tokens)
            and 0 <= self.min_tokens <= MAX_COUNT
            and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
            "min_tokens",
            self.min_tokens,
            "a whole number >= 0"
            + ("" if self.max_tokens is None else f", at most max_tokens {self.max_tokens}"),
        )
        _require(
            len(self.stop) <= MAX_STOP_STRINGS
            and all(is_text(s) and 0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
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


def _set(params: SamplingParams, field: str, value: object) -> None:
    msgspec.structs.force_setattr(params, field, value)


def _as_tuple(field: str, value: Any, members: str) -> tuple[Any, ...]:
    """None means none; what is no list stays out, text too, which would fall into characters."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{field} is {shown(value)}; it must be a list of {members}", field=field)
    return tuple(value)


def _with_int_keys(bias: Any) -> Any:
    """JSON has only text keys. What is no whole number stays, for the check to name."""
    if not isinstance(bias, Mapping):
        raise InvalidRequestError(
            f"logit_bias is {shown(bias)}; it must be an object of token ids and numbers", field="logit_bias"
        )
    return {int(t) if isinstance(t, str) and t.isdecimal() and len(t) < 20 else t: v for t, v in bias.items()}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _require(legal: bool, field: str, value: object, rule: str) -> None:
    if not legal:
        raise InvalidRequestError(f"{field} is {shown(value)}; it must be {rule}", field=field)
