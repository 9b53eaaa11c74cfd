"""Results of requests, shaped as in vLLM."""

from dataclasses import dataclass

from actors.requests import FinishReason, Request, RequestUpdate, TokenLogprob
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.philox import choice_seed


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
    seed: int
    """The effective seed: as the seed of a request with n = 1 it gives this completion again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """What became of one prompt: params.n completions.

    num_draft_tokens and num_accepted_tokens count MTP drafts that were verified, and that held.
    """

    request_id: str
    prompt: str | None
    """None when the prompt was given as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Like `logprobs`, of the prompt's tokens; the first has none. None when not asked for."""
    outputs: list[CompletionOutput]
    finished: bool
    seed: int
    """The effective seed: the request's own, or the one drawn for it."""
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class _Choice:
    """Collects the updates of one completion; owns its text."""

    def __init__(self, request: Request, index: int, frontend: ModelFrontend) -> None:
        self.seed = choice_seed(request.seed, index)
        self.stream = frontend.text_stream(request.params)
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.last = RequestUpdate(request_id=request.request_id, token_ids=())

    def push(self, update: RequestUpdate) -> str:
        text = self.stream.consume(update)
        self.text.append(text)
        self.token_ids.extend(update.token_ids)
        self.logprobs.extend(update.logprobs)
        self.last = update
        return text


class OutputBuilder:
    """Collects the updates of one prompt's completions."""

    def __init__(self, request: Request, frontend: ModelFrontend, *, prompt: str | None = None) -> None:
        self.request = request
        self._prompt = prompt
        self._tokenizer = frontend.tokenizer
        self._choices = [_Choice(request, index, frontend) for index in range(request.params.n)]
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def finished(self) -> bool:
        return all(choice.last.finish_reason is not None for choice in self._choices)

    def push(self, update: RequestUpdate) -> str:
        """Add an update of the request. Returns the text that it makes certain."""
        self._prompt_logprobs = self._prompt_logprobs or update.prompt_logprobs
        return self._choices[update.index].push(update)

    def output(self) -> RequestOutput:
        """The result so far."""
        completions = self._choices
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.request.prompt_token_ids),
            prompt_logprobs=self.prompt_logprobs(),
            outputs=[self.completion(index) for index in range(len(completions))],
            finished=self.finished,
            seed=self.request.seed,
            num_cached_tokens=max(choice.last.num_cached_tokens for choice in completions),
            num_draft_tokens=sum(choice.last.num_draft_tokens for choice in completions),
            num_accepted_tokens=sum(choice.last.num_accepted_tokens for choice in completions),
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Of the prompt's tokens; None when not asked for."""
        if self.request.params.prompt_logprobs is None:
            return None
        return [None, *(self._alternatives(entry) for entry in self._prompt_logprobs)]

    def completion(self, index: int) -> CompletionOutput:
        """One of the n, so far."""
        choice = self._choices[index]
        wanted = self.request.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(choice.text),
            token_ids=list(choice.token_ids),
            cumulative_logprob=sum(entry.logprob for entry in choice.logprobs) if wanted else None,
            logprobs=[self._alternatives(entry) for entry in choice.logprobs] if wanted else None,
            finish_reason=choice.last.finish_reason,
            stop_reason=choice.last.matched_stop,
            seed=choice.seed,
        )

    def part(self, update: RequestUpdate, text: str) -> CompletionOutput:
        """What one update adds to its completion. text: what `push` returned for it."""
        wanted = self.request.params.logprobs is not None
        return CompletionOutput(
            index=update.index,
            text=text,
            token_ids=list(update.token_ids),
            logprobs=[self._alternatives(entry) for entry in update.logprobs] if wanted else None,
            finish_reason=update.finish_reason,
            stop_reason=update.matched_stop,
            seed=self._choices[update.index].seed,
        )

    def _alternatives(self, entry: TokenLogprob) -> dict[int, Logprob]:
        """The token itself first, then the best ones."""
        ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
        values = {entry.token_id: entry.logprob} | dict(entry.top)
        detokenize = self.request.params.detokenize
        return {
            token_id: Logprob(
                logprob=value,
                rank=ranks.get(token_id),
                decoded_token=(
                    self._tokenizer.decode([token_id], skip_special_tokens=False) if detokenize else None
                ),
            )
            for token_id, value in values.items()
        }
