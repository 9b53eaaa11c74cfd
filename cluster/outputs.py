"""Results of requests, shaped as in vLLM."""

from dataclasses import dataclass

from actors.requests import FinishReason, Request, RequestUpdate, TokenLogprob
from cluster.frontend import ModelFrontend


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of a token under the model's own distribution.

    rank: 1 is the most likely; None where the token is not among the alternatives asked for.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion. logprobs[i] maps the i-th token and its best alternatives to their values."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it; None for EOS and length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of one prompt.

    num_draft_tokens and num_accepted_tokens count MTP drafts that were verified, and that held.
    """

    request_id: str
    prompt: str | None
    """None when the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    """The effective seed: the request's own, or the one drawn for it."""
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class OutputBuilder:
    """Collects one request's updates; owns its text."""

    def __init__(self, request: Request, frontend: ModelFrontend, *, prompt: str | None = None) -> None:
        self.request = request
        self._prompt = prompt
        self._tokenizer = frontend.tokenizer
        self._stream = frontend.text_stream(request.params)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._last: RequestUpdate | None = None

    @property
    def finished(self) -> bool:
        return self._last is not None and self._last.finish_reason is not None

    def push(self, update: RequestUpdate) -> str:
        """Add an update. Returns the text that it makes certain."""
        text = self._stream.consume(update)
        self._text.append(text)
        self._token_ids.extend(update.token_ids)
        self._logprobs.extend(update.logprobs)
        self._last = update
        return text

    def output(self) -> RequestOutput:
        """The result so far."""
        last = self._last or RequestUpdate(request_id=self.request.request_id, token_ids=())
        wanted = self.request.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text="".join(self._text),
            token_ids=list(self._token_ids),
            cumulative_logprob=sum(entry.logprob for entry in self._logprobs) if wanted else None,
            logprobs=[self._alternatives(entry) for entry in self._logprobs] if wanted else None,
            finish_reason=last.finish_reason,
            stop_reason=last.matched_stop,
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            outputs=[completion],
            finished=self.finished,
            seed=self.request.seed,
            num_cached_tokens=last.num_cached_tokens,
            num_draft_tokens=last.num_draft_tokens,
            num_accepted_tokens=last.num_accepted_tokens,
        )

    def _alternatives(self, entry: TokenLogprob) -> dict[int, Logprob]:
        """The emitted token first, then the best ones."""
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        values = {entry.token_id: entry.logprob} | dict(entry.top)
        return {
            token_id: Logprob(
                logprob=value,
                rank=ranks.get(token_id),
                decoded_token=self._tokenizer.decode([token_id], skip_special_tokens=False),
            )
            for token_id, value in values.items()
        }
