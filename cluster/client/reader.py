"""The messages of a Generate call -> pieces of text, or one completion."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from actors.requests import FinishReason, TokenLogprob
from actors.sampling_params import SamplingParams
from cluster.client.results import Completion, Piece, Usage
from cluster.tokenizer.text_stream import TextStream
from kernels_integration.errors import LatentrayError
from kernels_integration.philox import choice_seed

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")


class CallReader:
    """Reads one call. Without a tokenizer there is no text."""

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]
    ) -> None:
        # A token that ends the stream by itself is counted, but is no text.
        self._silent = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        if params.include_stop_str_in_output:
            self._silent = set()
        self._texts = [] if tokenizer is None else [TextStream.of(params, tokenizer) for _ in range(params.n)]

    def piece(self, response: pb.GenerateResponse, seed: int | None) -> Piece:
        """A chunk's tokens, or what `complete` adds to a stream. seed: of the request."""
        if response.WhichOneof("response") == "chunk":
            chunk = response.chunk
            return Piece(
                index=chunk.index,
                text=self._push(chunk.index, chunk.token_ids),
                token_ids=tuple(chunk.token_ids),
                logprobs=_logprobs(chunk.output_logprobs),
                prompt_logprobs=_prompt_logprobs(chunk.input_logprobs),
            )
        complete = response.complete
        matched_stop = _matched_stop(complete)
        return Piece(
            index=complete.index,
            text=self._finish(complete.index, matched_stop),
            finish_reason=_finish_reason(complete),
            matched_stop=matched_stop,
            usage=_usage(complete),
            seed=_choice_seed(seed, complete.index),
        )

    def completion(
        self, request_id: str, responses: Sequence[pb.GenerateResponse], seed: int | None
    ) -> Completion:
        """The messages of a call that does not stream: one for each choice. seed: of the request."""
        messages = sorted((response.complete for response in responses), key=lambda message: message.index)
        first, *others = (self._completion(request_id, message, seed) for message in messages)
        return replace(first, others=tuple(others))

    def _completion(self, request_id: str, complete: pb.GenerateComplete, seed: int | None) -> Completion:
        matched_stop = _matched_stop(complete)
        return Completion(
            request_id=request_id,
            text=self._push(complete.index, complete.output_ids) + self._finish(complete.index, matched_stop),
            token_ids=tuple(complete.output_ids),
            logprobs=_logprobs(complete.output_logprobs),
            prompt_logprobs=_prompt_logprobs(complete.input_logprobs),
            finish_reason=_finish_reason(complete),
            matched_stop=matched_stop,
            usage=_usage(complete),
            seed=_choice_seed(seed, complete.index),
        )

    def _push(self, index: int, token_ids: Sequence[int]) -> str:
        if not self._texts:
            return ""
        return self._texts[index].push([t for t in token_ids if t not in self._silent])

    def _finish(self, index: int, matched_stop: int | str | None) -> str:
        return self._texts[index].finish(matched_stop) if self._texts else ""


def _choice_seed(seed: int | None, index: int) -> int | None:
    return None if seed is None else choice_seed(seed, index)


def _finish_reason(complete: pb.GenerateComplete) -> FinishReason:
    for reason in FINISH_REASONS:
        if complete.finish_reason == reason:
            return reason
    raise LatentrayError(
        f"the server ended the stream with finish_reason {complete.finish_reason!r}; "
        f"a stream ends with {' or '.join(FINISH_REASONS)}"
    )


def _matched_stop(complete: pb.GenerateComplete) -> int | str | None:
    kind = complete.WhichOneof("matched_stop")
    value: Any = getattr(complete, kind) if kind else None
    return value  # type: ignore[no-any-return]


def _usage(complete: pb.GenerateComplete) -> Usage:
    return Usage(
        prompt_tokens=complete.prompt_tokens,
        completion_tokens=complete.completion_tokens,
        cached_tokens=complete.cached_tokens,
        draft_tokens=complete.spec_draft_tokens,
        accepted_tokens=complete.spec_accepted_tokens,
    )


def _logprobs(message: pb.OutputLogProbs) -> tuple[TokenLogprob, ...]:
    tops = [tuple(zip(t.token_ids, t.values, strict=True)) for t in message.top_logprobs]
    return tuple(
        TokenLogprob(token_id=token_id, logprob=logprob, top=tops[i] if tops else ())
        for i, (token_id, logprob) in enumerate(zip(message.token_ids, message.token_logprobs, strict=True))
    )


def _prompt_logprobs(message: pb.InputLogProbs) -> tuple[TokenLogprob, ...]:
    """Of the tokens but the first, which has none."""
    values = [entry.value for entry in message.token_logprobs]
    tops = [tuple(zip(t.token_ids, t.values, strict=True)) for t in message.top_logprobs]
    entries = [
        TokenLogprob(token_id=token_id, logprob=value, top=tops[i] if tops else ())
        for i, (token_id, value) in enumerate(zip(message.token_ids, values, strict=True))
    ]
    return tuple(entries[1:])
