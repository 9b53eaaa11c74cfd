"""`make demo`: the whole system once, small. A group on a local Ray, a gateway, a client, two answers."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.answering.group_client import current_stats
from cluster.client import Client, SamplingParams
from cluster.config import ServeArgs
from cluster.frontend.front_end import ModelFrontend
from cluster.launch.serving import RunningServer, start_server


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt of the demo. A chat question goes through the checkpoint's chat template."""

    title: str
    text: str
    is_chat: bool
    params: SamplingParams


QUESTIONS = (
    Question(
        title="greedy",
        text="What is the capital of France?",
        is_chat=True,
        params=SamplingParams(temperature=0.0, max_tokens=48),
    ),
    Question(
        title="temperature 0.8, seed 7",
        text="The SELECT statement",
        is_chat=False,
        params=SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=96),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAnswer:
    """What one question cost. Times in seconds, as the client saw them."""

    title: str
    num_tokens: int
    ttft_s: float
    tokens_per_s: float
    """After the first token."""
    tokens_per_verify: float
    acceptance: tuple[float, ...]
    """Share of the proposed drafts that held, by draft position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    answers: tuple[DemoAnswer, ...]
    memory: dict[str, int]
    """Resident bytes of each actor."""


def run_demo(
    args: ServeArgs,
    *,
    progress: Callable[[str], None],
    show: Callable[[str], None],
    questions: Sequence[Question] = QUESTIONS,
) -> DemoResult:
    """Start a server, stream the answers through `show`, stop the server. Errors: as start_server."""
    with start_server(args, progress=progress) as server:
        progress("")
        frontend = ModelFrontend.of_group(server.config)
        with Client(server.address) as client:
            answers = tuple(_ask(client, server, frontend, question, show) for question in questions)
        return DemoResult(answers=answers, memory=server.memory())


def _ask(
    client: Client,
    server: RunningServer,
    frontend: ModelFrontend,
    question: Question,
    show: Callable[[str], None],
) -> DemoAnswer:
    prompt: str | Sequence[int] = question.text
    if question.is_chat:
        prompt = frontend.render_chat([{"role": "user", "content": question.text}])
    before = asyncio.run(current_stats(server.groups[0].request_address, server.groups[0].request_keys))
    show(f"\n[{question.title}] {question.text}{' -> ' if question.is_chat else ''}")
    start_s = first_s = last_s = time.perf_counter()
    num_tokens = num_first = 0
    for piece in client.generate(prompt, question.params):
        show(piece.text)
        if piece.token_ids:
            last_s = time.perf_counter()
            if num_tokens == 0:
                first_s, num_first = last_s, len(piece.token_ids)
            num_tokens += len(piece.token_ids)
    show("\n")
    after = asyncio.run(current_stats(server.groups[0].request_address, server.groups[0].request_keys))
    num_verifies = after.num_verifies - before.num_verifies
    accepted = [a - b for a, b in zip(after.accepted, before.accepted, strict=True)]
    proposed = [a - b for a, b in zip(after.proposed, before.proposed, strict=True)]
    return DemoAnswer(
        title=question.title,
        num_tokens=num_tokens,
        ttft_s=first_s - start_s,
        tokens_per_s=(num_tokens - num_first) / max(last_s - first_s, 1e-9),
        tokens_per_verify=1 + sum(accepted) / max(num_verifies, 1),
        acceptance=tuple(a / max(p, 1) for a, p in zip(accepted, proposed, strict=True)),
    )
