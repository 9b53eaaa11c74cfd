"""Dynamic k against k = 0 and against the ceiling, over batch sizes and texts of high and low acceptance.

    python -m benchmarks.dynamic_k [--batches 1 4 16 32] [--ceiling 3] [--texts text loop chat] [--tokens 120]

The three groups live in this process, one shard with one thread each, and take turns every few steps, so
that whatever else the machine does meets all three alike. Time is the CPU time of this process while it is
a group's turn: on an idle core that is the wall time of its steps; on a shared one it leaves out who else
ran. Dynamic k decides by the same clock. All requests of a round start together and have the same length;
the first round, in which dynamic k still measures, is reported apart.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from benchmarks import harness
from cluster.config.args import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend

TURN_STEPS = 6
PROMPT_TOKENS = 48

Prompts = Sequence[Sequence[int]]


class TurnClock:
    """Seconds of CPU time that pass only between `start` and `stop`."""

    def __init__(self) -> None:
        self._passed_s = 0.0
        self._started_at: float | None = None

    def __call__(self) -> float:
        running = 0.0 if self._started_at is None else time.process_time() - self._started_at
        return self._passed_s + running

    def start(self) -> None:
        self._started_at = time.process_time()

    def stop(self) -> None:
        self._passed_s, self._started_at = self(), None


@dataclass
class Contender:
    """One group, its clock, and what it did in the present round."""

    name: str
    group: InlineGroup
    clock: TurnClock
    num_tokens: int = 0
    k: Counter[int] = field(default_factory=Counter)

    @classmethod
    def create(cls, name: str, **changes: object) -> "Contender":
        clock = TurnClock()
        values = {
            "model_path": str(BUNDLED_CHECKPOINT),
            "served_model_name": "tiny-dsa",
            "max_model_len": 2048,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 8192,
            "block_size": 16,
            "num_kv_blocks": 4096,
            "dtype": "float32",
            "kv_cache_dtype": "float32",
            "enable_prefix_caching": False,
        }
        config = GroupConfig(**values | changes)  # type: ignore[arg-type]
        return cls(name, InlineGroup(config, clock=clock), clock)

    def turn(self) -> None:
        self.clock.start()
        for _ in range(TURN_STEPS):
            if self.group.has_work:
                for update in self.group.step():
                    self.num_tokens += len(update.token_ids)  # type: ignore[union-attr]
                if last_k := self.group.stats().last_k:
                    self.k[len(last_k) - 1] += 1
        self.clock.stop()


def round_of(
    contenders: Sequence[Contender], prompts: Prompts, num_tokens: int, temperature: float
) -> dict[str, float]:
    """Tokens per second of each; prefill is done before the clock counts."""
    for contender in contenders:
        for i, prompt in enumerate(prompts):
            contender.group.submit(
                harness.request(
                    f"{time.monotonic_ns()}-{i}",
                    prompt,
                    num_tokens=num_tokens,
                    temperature=temperature,
                    seed=i,
                )
            )
        contender.group.step()
        contender.num_tokens = 0
        contender.k.clear()
    started = [contender.clock() for contender in contenders]
    while any(contender.group.has_work for contender in contenders):
        for contender in contenders:
            contender.turn()
    return {c.name: c.num_tokens / (c.clock() - start) for c, start in zip(contenders, started, strict=True)}


def text_prompts(frontend: ModelFrontend) -> Prompts:
    """Beginnings of held-out passages, to be continued."""
    return [frontend.tokenizer.encode(text)[:PROMPT_TOKENS] for _, text in _heldout("text")]


def loop_prompts(frontend: ModelFrontend) -> Prompts:
    """A few tokens over and over: greedily, the model goes on like that."""
    return [(list(ids[1:7]) * PROMPT_TOKENS)[:PROMPT_TOKENS] for ids in text_prompts(frontend)]


def chat_prompts(frontend: ModelFrontend) -> Prompts:
    """Held-out questions, answered at temperature 1."""
    questions = [question for question, _ in _heldout("chat")]
    return [frontend.render_chat([{"role": "user", "content": question}]) for question in questions]


def _heldout(kind: str) -> list[tuple[str, str]]:
    content: dict[str, list[tuple[str, str]]] = json.loads(
        Path(BUNDLED_CHECKPOINT, "heldout_prompts.json").read_text()
    )
    return content[kind]


TEXTS: dict[str, tuple[Callable[[ModelFrontend], Prompts], float]] = {
    "text": (text_prompts, 0.0),
    "loop": (loop_prompts, 0.0),
    "chat": (chat_prompts, 1.0),
}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--texts", nargs="+", choices=sorted(TEXTS), default=sorted(TEXTS))
    parser.add_argument("--ceiling", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160, help="of each completion")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(harness.machine())
    torch.set_num_threads(1)
    frontend = ModelFrontend.from_pretrained(
        str(BUNDLED_CHECKPOINT), served_model_name="tiny-dsa", max_model_len=2048, seed=0
    )
    print("tokens per CPU second, and dynamic over the better of the other two")
    for text in args.texts:
        make, temperature = TEXTS[text]
        prompts = make(frontend)
        contenders = [
            Contender.create("k = 0"),
            Contender.create(f"k = {args.ceiling}", num_speculative_tokens=args.ceiling),
            Contender.create(
                "dynamic", num_speculative_tokens=args.ceiling, dynamic_speculative_decoding=True
            ),
        ]
        for size in args.batches:
            sums: Counter[str] = Counter()
            for number in range(args.rounds):
                speeds = round_of(contenders, prompts[:size], args.tokens, temperature)
                if number:
                    sums.update({name: 1 / speed for name, speed in speeds.items()})
                if number in (0, args.rounds - 1):
                    shown = speeds if not number else {n: (args.rounds - 1) / s for n, s in sums.items()}
                    report(text, size, "first" if not number else "later", shown, contenders[2].k)
        for contender in contenders:
            contender.group.close()


def report(text: str, size: int, rounds: str, speeds: dict[str, float], k: Counter[int]) -> None:
    *fixed, dynamic = speeds.values()
    steps = ", ".join(f"{n} x {k[n]}" for n in sorted(k))
    print(
        f"{text:5} batch {size:3} {rounds} rounds: "
        + ", ".join(f"{name} {speed:.0f}" for name, speed in speeds.items())
        + f", ratio {dynamic / max(fixed):.3f}; steps by k: {steps}",
        flush=True,
    )


if __name__ == "__main__":
    main()
