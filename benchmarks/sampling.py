"""Time of one sampling call, per kind of row: `python -m benchmarks.sampling` (one thread, one rank).

As in a process of the native backend where a compiler is, by torch with --torch.

Logits are Gaussian with deviation 4: over 6144 tokens an entropy of 3.2 nats and a 0.9 nucleus of 60 tokens
(median), as the bundled checkpoint's over running text.
"""

import statistics
import time
from dataclasses import replace

import numpy as np
import torch

from actors.messages import Admission, SamplingSpec
from actors.shard.boundary import Boundary
from actors.shard.slot_rules import SlotRules
from benchmarks import harness
from kernels_integration.collectives import SoloCollectives
from kernels_integration.logit_rules import LogitRules
from kernels_integration.native.library import is_available
from kernels_integration.sampling import SamplingRows, sample

KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "min-p 0.05": {"min_p": 0.05},
    "greedy + 5 logprobs": {"temperature": 0.0, "num_logprobs": 5},
    "greedy + penalties": {"temperature": 0.0, "penalty": 0.5},
    "temperature 1 + penalties": {"penalty": 0.5},
}
HISTORY = 500
"""Tokens of each penalised request."""


def make_rows(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_k: float = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    num_logprobs: float = -1,
    rules: LogitRules | None = None,
) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), int(top_k)),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.full((num_rows,), min_p),
        seed=torch.arange(num_rows) * 7919 + 2**40,
        position=torch.arange(num_rows) + 100,
        rules=rules,
        num_logprobs=int(num_logprobs),
    )


def make_slot_rules(num_slots: int, vocab_size: int, penalty: float) -> SlotRules:
    rules = SlotRules(vocab_start=0, slice_size=vocab_size, boundary=Boundary(torch.device("cpu")))
    sampling = SamplingSpec(
        presence_penalty=penalty, frequency_penalty=penalty, repetition_penalty=1 + penalty
    )
    for slot in range(num_slots):
        history = np.random.default_rng(slot).integers(0, vocab_size, HISTORY).astype(np.int32)
        rules.admit(
            Admission(
                slot=slot,
                admission=1,
                limit=2 * HISTORY,
                prompt_len=HISTORY // 2,
                seed=0,
                sampling=sampling,
                history=history,
            )
        )
    return rules


def make_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_rows, vocab_size, generator=generator).mul_(4)


def median_us(
    num_rows: int, vocab_size: int, seconds: float, *, penalty: float = 0, **options: float
) -> float:
    """Gathering a penalised batch's rules is part of its time."""
    comm = SoloCollectives()
    logits = make_logits(num_rows, vocab_size)
    slots, positions = np.arange(num_rows), np.full(num_rows, HISTORY)
    slot_rules = make_slot_rules(num_rows if penalty else 0, vocab_size, penalty)
    rows = make_rows(num_rows, **options)  # type: ignore[arg-type]
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 10:
        start = time.perf_counter()
        rules = slot_rules.gather(slots, positions, None)
        sample(logits, 0, rows if rules is None else replace(rows, rules=rules), comm)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 32, 128])
    parser.add_argument("--vocab-size", type=int, default=6144)
    parser.add_argument("--seconds", type=float, default=1.0, help="per cell")
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    is_native = not args.torch and is_available()  # which loads the compiled code
    print(harness.machine(), "native" if is_native else "torch", sep=", ")
    torch.set_num_threads(1)
    print(f"us per call, vocabulary {args.vocab_size}, float32, one thread")
    print(f"{'rows':26}" + "".join(f"{num_rows:>10}" for num_rows in args.rows))
    for name, options in KINDS.items():
        cells = []
        for num_rows in args.rows:
            cells.append(median_us(num_rows, args.vocab_size, args.seconds, **options))
        print(f"{name:26}" + "".join(f"{cell:10.0f}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
