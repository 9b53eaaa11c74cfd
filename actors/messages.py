"""The messages of a step: one StepInput to every shard, one StepOutput from rank 0.

Requests stand in the same order in both: verifies first, by k descending, then chunks.
Arrays are little-endian int32 / uint8 / float32 NumPy arrays; ragged fields come with an indptr
(`x[x_indptr[i]:x_indptr[i + 1]]` belongs to request i).
"""

from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from actors.acceptance import StandardRejection
from actors.sampling_params import ShardParams

Int32s = NDArray[np.int32]
Uint8s = NDArray[np.uint8]
Float32s = NDArray[np.float32]


PENDING_CAPACITY = 32
"""Accepted rows of a request that may wait for the MTP layer (R in contracts/mtp.md); older ones fall out."""


class RowKind(IntEnum):
    """What a scheduled request's rows are."""

    VERIFY = 0
    """The anchor (last committed token) and k drafts: reports k + 1 tokens."""
    MIDDLE_CHUNK = 1
    """Prompt rows that do not reach the last committed token: reports none."""
    FINAL_CHUNK = 2
    """Prompt rows up to the last committed token: reports one token."""


class SamplingSpec(ShardParams, frozen=True, kw_only=True, array_like=True):
    """How a request's tokens are drawn on the shards: the parameters that they need, and what follows from
    the others. Neutral values switch a rule off."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences of which the completion may not draw the last token after the others."""
    end_token_ids: tuple[int, ...] = ()
    """Not drawn for the first min_tokens tokens of the completion."""
    grammar_end_ids: tuple[int, ...] = ()
    """With structured_outputs: the ends of text, legal where the grammar is complete."""

    @property
    def num_logprobs(self) -> int:
        """-1: none; n >= 0: the token's own log probability and the n best."""
        return -1 if self.logprobs is None else self.logprobs

    @property
    def num_prompt_logprobs(self) -> int:
        """The same, for the prompt's tokens."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def has_rules(self) -> bool:
        """Some logits are edited before the temperature."""
        ends = self.min_tokens and self.end_token_ids
        has_sets = self.logit_bias or self.allowed_token_ids or self.bad_words or self.structured_outputs
        return bool(self.has_penalties or has_sets or ends)

    @property
    def needs_history(self) -> bool:
        """The shards must know the tokens before a row."""
        by_text = bool(self.bad_words) or self.structured_outputs is not None
        return self.has_penalties or by_text or self.num_prompt_logprobs >= 0


class Admission(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A request takes a state slot (first time, after preemption, after restart)."""

    slot: int
    admission: int
    """Unique in the group's life; a result counts only under the number it was sent with."""
    limit: int
    """min(max_model_len, prompt + max_tokens): positions >= limit - 1 are never written."""
    prompt_len: int
    """Tokens of the user's prompt (a re-admission also replays committed tokens)."""
    seed: int
    """uint64, the effective seed."""
    sampling: SamplingSpec
    history: Int32s = msgspec.field(default_factory=lambda: np.empty(0, np.int32))
    """All committed tokens, prompt first, where sampling.needs_history; else empty."""


class StepInput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The rows of one step. N scheduled requests."""

    epoch: int
    step: int
    admit: tuple[Admission, ...] = ()
    slot: Int32s
    """[N] state slot."""
    admission: Int32s
    """[N]"""
    kind: Uint8s
    """[N] RowKind."""
    k: Uint8s
    """[N] drafts of a verify, 0 for chunks."""
    fill: Uint8s
    """[N] 1: run the MTP layer over the request's pending rows (always 1 where k > 0)."""
    start: Int32s
    """[N] position of the first row: the anchor's for a verify; -1 for a verify that was sent while an
    older step of its request was in flight: only the shards know how many tokens that step accepts."""
    readonly: Uint8s
    """[N] 1: a chunk row that is recomputed from cached KV and must not write."""
    ids: Int32s
    """Tokens of the chunks (none for verifies)."""
    ids_indptr: Int32s
    new_blocks: Int32s
    """Blocks appended to the request's table in this step; the whole table at admission."""
    new_blocks_indptr: Int32s
    accepted: Int32s
    """Verifies with a known start: tokens accepted in the request's last token step; the last is the anchor.
    The shards have come to the same tokens themselves, and check it."""
    accepted_indptr: Int32s


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Natural-log probabilities of the model's own distribution (before temperature and filters).

    One row per token of the requests that asked; n is the largest number asked for in the step.
    """

    sampled: Float32s
    """[M]"""
    top_ids: Int32s
    """[M * n] best tokens, descending (ties: lower id first)."""
    top_values: Float32s
    """[M * n]"""
    num_top: int


class StepOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What rank 0 reports. M = sum of k + 1 over verifies, plus the number of final chunks."""

    epoch: int
    step: int
    drafts: Int32s
    """[sum k] the drafts that the verify rows really held."""
    tokens: Int32s
    """[M], empty with a rejection: the target's own token of each row; -1 where masked."""
    length: Int32s
    """[N] tokens whose KV or hidden state the shard holds after the step, by the acceptance rule."""
    logprobs: TokenLogprobs | None = None
    """Entries of `tokens` of requests with num_logprobs >= 0, in order; None when no request asked."""
    prompt_logprobs: TokenLogprobs | None = None
    """Prompt tokens that the rows of chunks with num_prompt_logprobs >= 0 predict, in order of the rows: row
    position p predicts token p + 1 while that is part of the prompt."""
    rejection: StandardRejection | None = None
    """Standard rejection sampling: instead of tokens."""


_EXT_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<i4"), 2: np.dtype("<u1"), 3: np.dtype("<f4")}
_EXT_CODES = {dtype: code for code, dtype in _EXT_DTYPES.items()}


def encode_arrays(value: object) -> msgspec.msgpack.Ext:
    """msgspec hook: a one-dimensional NumPy array as its raw little-endian bytes."""
    if isinstance(value, np.ndarray) and value.dtype in _EXT_CODES:
        return msgspec.msgpack.Ext(_EXT_CODES[value.dtype], value.tobytes())
    raise NotImplementedError(f"{type(value).__name__} has no wire form")


def decode_arrays(code: int, data: memoryview) -> NDArray[Any]:
    """msgspec hook: the inverse of encode_arrays (read-only view of the message)."""
    if code not in _EXT_DTYPES:
        raise ValueError(f"arrays of kind {code} are unknown")
    return np.frombuffer(data, _EXT_DTYPES[code])


_encoder = msgspec.msgpack.Encoder(enc_hook=encode_arrays)
_input_decoder = msgspec.msgpack.Decoder(StepInput, ext_hook=decode_arrays)
_output_decoder = msgspec.msgpack.Decoder(StepOutput, ext_hook=decode_arrays)


def encode(message: StepInput | StepOutput) -> bytes:
    return _encoder.encode(message)


def decode_input(data: bytes) -> StepInput:
    return _input_decoder.decode(data)


def decode_output(data: bytes) -> StepOutput:
    return _output_decoder.decode(data)
