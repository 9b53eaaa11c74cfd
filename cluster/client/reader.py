"""The messages of a Generate call -> pieces of text, or one completion."""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from actors.requests import FinishReason, TokenLogprob
from actors.sampling_params import SamplingParams
from cluster.client.results import Completion, Piece, Usage
from cluster.tokenizer.text_stream import TextStream
from kernels_integration.errors import LatentrayError

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")


class AnswerReader:
    """Reads one call. Without a tokenizer there is no text."""

    def __init__(
        self, params: SamplingParams, tokenizer: Tokenizer | None, eos_token_ids: Sequence[int]
    ) -> None:
        # A token that ends the stream by itself is counted, but is no text.
        self._silent = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self._text = (
            TextStream(tokenizer, stop=params.stop, skip_special_tokens=params.skip_special_tokens)
            if tokenizer is not None
            else None
        )

    def piece(self, response: pb.GenerateResponse, seed: int | None) -> Piece:
        """A chunk's tokens, or what `complete` adds to a stream."""
        if response.WhichOneof("response") == "chunk":
            chunk = response.chunk
            return Piece(
                text=self._push(chunk.token_ids),
                token_ids=tuple(chunk.token_ids),
                logprobs=_logprobs(chunk.output_logprobs),
            )
        complete = response.complete
        matched_stop = _matched_stop(complete)
        return Piece(
            text=self._finish(matched_stop),
            finish_reason=_finish_reason(complete),
            matched_stop=matched_stop,
            usage=_usage(complete),
            seed=seed,
        )

    def completion(self, request_id: str, response: pb.GenerateResponse, seed: int | None) -> Completion:
        """The only message of a call that does not stream."""
        complete = response.complete
        matched_stop = _matched_stop(complete)
        return Completion(
            request_id=request_id,
            text=self._push(complete.output_ids) + self._finish(matched_stop),
            token_ids=tuple(complete.output_ids),
            logprobs=_logprobs(complete.output_logprobs),
            finish_reason=_finish_reason(complete),
            matched_stop=matched_stop,
            usage=_usage(complete),
            seed=seed,
        )

    def _push(self, token_ids: Sequence[int]) -> str:
        if self._text is None:
            return ""
        return self._text.push([t for t in token_ids if t not in self._silent])

    def _finish(self, matched_stop: int | str | None) -> str:
        return "" if self._text is None else self._text.finish(matched_stop)


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
