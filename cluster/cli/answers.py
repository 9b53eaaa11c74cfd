"""Answers for `latentray generate`, from an engine of this process or from a server."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from actors.requests import FinishReason, Request, RequestUpdate, TokenLogprob
from actors.sampling_params import SamplingParams
from cluster.answering.engine import Engine
from cluster.frontend.front_end import ModelFrontend
from cluster.outputs import Logprob, OutputBuilder

if TYPE_CHECKING:
    from cluster.client.credentials import Credentials
    from cluster.client.results import Piece


Logprobs: TypeAlias = dict[int, float]
"""Token id -> log probability; the token itself first, then the best ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintableAnswer:
    """A finished answer, as --json prints it."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    seed: int | None
    num_prompt_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    logprobs: list[Logprobs] | None = None
    """Of each token of the completion and the best alternatives, when asked for."""
    prompt_logprobs: list[Logprobs | None] | None = None
    """The same of the prompt's tokens; the first has none."""


Show = Callable[[int, str, PrintableAnswer | None], None]
"""Called with an answer's index, more of its text, and with the last text the whole answer.

The n answers of a prompt stand together: index = prompt * n + choice."""


def ask_engine(engine: Engine, requests: Sequence[Request], frontend: ModelFrontend, show: Show) -> None:
    """All requests at once. Errors: what ends a request without an answer."""
    builders = {request.request_id: OutputBuilder(request, frontend) for request in requests}
    first_index, num_before = {}, 0
    for request in requests:
        first_index[request.request_id] = num_before
        num_before += request.params.n
    with closing(engine.run(requests)) as updates:
        for request_id, update in updates:
            if isinstance(update, Exception):
                raise update
            piece = builders[request_id].push(update)
            answer = None if update.finish_reason is None else _answer(builders[request_id], update)
            show(first_index[request_id] + update.index, piece, answer)


def _answer(builder: OutputBuilder, last: RequestUpdate) -> PrintableAnswer:
    completion, prompt_logprobs = builder.completion(last.index), builder.prompt_logprobs()
    return PrintableAnswer(
        text=completion.text,
        token_ids=completion.token_ids,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        seed=completion.seed,
        num_prompt_tokens=last.num_prompt_tokens,
        num_draft_tokens=last.num_draft_tokens,
        num_accepted_tokens=last.num_accepted_tokens,
        logprobs=None if completion.logprobs is None else [_values(entry) for entry in completion.logprobs],
        prompt_logprobs=(
            None
            if prompt_logprobs is None or last.index
            else [None if entry is None else _values(entry) for entry in prompt_logprobs]
        ),
    )


def _values(alternatives: Mapping[int, Logprob]) -> Logprobs:
    return {token_id: entry.logprob for token_id, entry in alternatives.items()}


def frontend_of_server(target: str, credentials: "Credentials") -> ModelFrontend:
    """A front end like the server's own, from what it tells. Errors: UnavailableError."""
    from cluster.client import Client

    with Client(target, credentials=credentials) as client:
        info = client.model_info()
        return ModelFrontend(
            tokenizer=client.tokenizer(),
            served_model_name=info.served_model_name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            default_sampling_params=info.default_sampling_params,
        )


def ask_server(
    target: str,
    credentials: "Credentials",
    questions: Sequence[tuple[str | Sequence[int], SamplingParams]],
    show: Show,
) -> None:
    """One prompt after the other, each with its parameters. Errors: what the server answers with."""
    from cluster.client import Client

    with Client(target, credentials=credentials) as client:
        for prompt_index, (prompt, params) in enumerate(questions):
            pieces: list[list[Piece]] = [[] for _ in range(params.n)]
            for piece in client.generate(prompt, params):
                pieces[piece.index].append(piece)
                answer = None if piece.finish_reason is None else _answer_of(pieces[piece.index], params)
                show(prompt_index * params.n + piece.index, piece.text, answer)


def _answer_of(pieces: Sequence["Piece"], params: SamplingParams) -> PrintableAnswer:
    last = pieces[-1]
    usage = last.usage
    prompt_logprobs = [_own_first(entry) for piece in pieces for entry in piece.prompt_logprobs]
    return PrintableAnswer(
        text="".join(piece.text for piece in pieces),
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        finish_reason=last.finish_reason,
        stop_reason=last.matched_stop,
        seed=last.seed,
        num_prompt_tokens=usage.prompt_tokens if usage else 0,
        num_draft_tokens=usage.draft_tokens if usage else 0,
        num_accepted_tokens=usage.accepted_tokens if usage else 0,
        logprobs=(
            None
            if params.logprobs is None
            else [_own_first(entry) for piece in pieces for entry in piece.logprobs]
        ),
        prompt_logprobs=[None, *prompt_logprobs] if prompt_logprobs else None,
    )


def _own_first(entry: TokenLogprob) -> Logprobs:
    return {entry.token_id: entry.logprob} | dict(entry.top)
