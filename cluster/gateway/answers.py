"""Updates of a request -> the messages of its Generate stream.

A streamed answer is chunks, then one `complete`. Chunks are deltas: ids, counts and log probabilities
of the tokens that are new. `complete` holds the totals and all ids in both modes, so a client may read
either; log probabilities stand in chunks when streaming and in `complete` when not (never twice:
they are the bulk of an answer, and a `complete` must fit one message).
"""

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.requests import Request, RequestUpdate, TokenLogprob


class AnswerMessages:
    """What to send for each update of one choice of a request."""

    def __init__(self, request: Request, *, index: int, stream: bool) -> None:
        self._request = request
        self._index = index
        self._stream = stream
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        """Of a call that does not stream."""
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        """Until they are sent."""

    def messages(self, update: RequestUpdate) -> list[pb.GenerateResponse]:
        """The chunk (if there are tokens) and, with the last update, the `complete`."""
        self._token_ids += update.token_ids
        self._prompt_logprobs = self._prompt_logprobs or update.prompt_logprobs
        messages = []
        if not self._stream:
            self._logprobs += update.logprobs
        elif update.token_ids:
            messages.append(pb.GenerateResponse(chunk=self._chunk(update)))
        if update.finish_reason is not None:
            messages.append(pb.GenerateResponse(complete=self._complete(update)))
        return messages

    def _chunk(self, update: RequestUpdate) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=update.token_ids,
            prompt_tokens=update.num_prompt_tokens,
            completion_tokens=len(update.token_ids),
            cached_tokens=update.num_cached_tokens,
            output_logprobs=_output_logprobs(update.logprobs),
            input_logprobs=self._take_input_logprobs(),
            index=self._index,
        )

    def _complete(self, update: RequestUpdate) -> pb.GenerateComplete:
        complete = pb.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=update.finish_reason,
            prompt_tokens=update.num_prompt_tokens,
            completion_tokens=update.num_completion_tokens,
            cached_tokens=update.num_cached_tokens,
            output_logprobs=_output_logprobs(self._logprobs),
            spec_accepted_tokens=update.num_accepted_tokens,
            spec_draft_tokens=update.num_draft_tokens,
            input_logprobs=self._take_input_logprobs(),
            index=self._index,
        )
        if isinstance(update.matched_stop, str):
            complete.matched_stop_str = update.matched_stop
        elif update.matched_stop is not None:
            complete.matched_token_id = update.matched_stop
        return complete

    def _take_input_logprobs(self) -> pb.InputLogProbs | None:
        """The prompt's, in the first message only."""
        entries, self._prompt_logprobs = self._prompt_logprobs, ()
        if not entries:
            return None
        first = pb.InputTokenLogProb()  # the first token has none
        return pb.InputLogProbs(
            token_logprobs=[first, *(pb.InputTokenLogProb(value=entry.logprob) for entry in entries)],
            token_ids=self._request.prompt_token_ids,
            top_logprobs=[pb.TopLogProbs(), *map(_top_logprobs, entries)],
        )


def _output_logprobs(logprobs: Sequence[TokenLogprob]) -> pb.OutputLogProbs | None:
    if not logprobs:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in logprobs],
        token_ids=[entry.token_id for entry in logprobs],
        top_logprobs=[_top_logprobs(entry) for entry in logprobs if entry.top],
    )


def _top_logprobs(entry: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(token_ids=[t for t, _ in entry.top], values=[v for _, v in entry.top])
