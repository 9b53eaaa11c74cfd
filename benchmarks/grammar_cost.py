"""What grammars cost, and what drafts bring under them: `python -m benchmarks.grammar_cost`.

    python -m benchmarks.grammar_cost [--batches 1 8 32] [--drafts 0 3] [--repeats 5]

Steps of one rank whose requests all have a grammar, against the same without; modes take turns. No grammar is
complete before the limit. "masks" is the time of the matchers and masks alone, as a call of SlotRules takes
it, for vocabularies of two sizes.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from actors.grammar.compiler import GrammarCompiler
from actors.inline_group import InlineGroup
from actors.messages import Admission, SamplingSpec
from actors.requests import Request
from actors.shard.boundary import Boundary
from actors.shard.slot_rules import Preceding, SlotRules
from actors.structured_outputs import StructuredOutputs
from benchmarks import harness
from cluster.config import BUNDLED_CHECKPOINT

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["a", "b", "other"]},
        },
        "required": ["name", "age", "kind"],
    },
    "minItems": 20,
}
GRAMMARS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "json": {"json": SCHEMA},
    "text in json": {
        "json": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 2000}},
            "required": ["text"],
        }
    },
    "words": {"regex": "([a-z]+ )+Z"},
}
NEW_TOKENS = 64
PROMPT_LEN = 16
EOS = 1


def requests_for(num_requests: int, grammar: dict[str, Any] | None, tag: str) -> list[Request]:
    """Different prompts and seeds at temperature 1; all go on to the limit."""
    found = []
    for i in range(num_requests):
        prompt = [(hash((tag, i, j)) % 4000) + 8 for j in range(PROMPT_LEN)]
        found.append(
            harness.request(
                f"{tag}-{i}",
                prompt,
                num_tokens=NEW_TOKENS,
                seed=i,
                temperature=1.0,
                structured_outputs=grammar,
            )
        )
    return found


def run(group: InlineGroup, requests: Sequence[Request]) -> tuple[float, int, tuple[int, int, int]]:
    """Seconds, steps, and verifies, drafts proposed and accepted of them."""
    before = group.stats()
    began = time.perf_counter()
    for request in requests:
        group.submit(request)
    while group.has_work:
        group.step()
    seconds, after = time.perf_counter() - began, group.stats()
    counts = (
        after.num_verifies - before.num_verifies,
        sum(after.proposed) - sum(before.proposed),
        sum(after.accepted) - sum(before.accepted),
    )
    return seconds, after.num_steps - before.num_steps, counts


def steps(batch: int, drafts: int, repeats: int) -> None:
    config = harness.config(
        num_speculative_tokens=drafts,
        max_num_seqs=batch,
        max_model_len=PROMPT_LEN + NEW_TOKENS,
        kv_cache_memory_bytes="64M",
    )
    group = InlineGroup(config)
    per_step: dict[str, list[float]] = {name: [] for name in GRAMMARS}
    per_token: dict[str, list[float]] = {name: [] for name in GRAMMARS}
    counts = {name: np.zeros(3, np.int64) for name in GRAMMARS}
    for turn in range(repeats + 1):
        for name, grammar in GRAMMARS.items():
            requests = requests_for(batch, grammar, f"{name}-{turn}")
            seconds, num_steps, counted = run(group, requests)
            if turn:  # the first makes the masks
                per_step[name].append(1e3 * seconds / num_steps)
                per_token[name].append(1e3 * seconds / (batch * NEW_TOKENS))
                counts[name] += counted
    group.close()
    for name in GRAMMARS:
        verifies, proposed, accepted = counts[name].tolist()
        acceptance = f"{accepted / proposed:10.2f}{1 + accepted / verifies:12.2f}" if proposed else ""
        print(
            f"{batch:5}{drafts:8}  {name:14}{statistics.median(per_step[name]):10.2f}"
            f"{statistics.median(per_token[name]):12.3f}{acceptance}",
            flush=True,
        )


def masks(vocabulary: str, path: Path, vocab_size: int, seconds: float) -> None:
    """One step of a batch with three drafts each, inside strings and between values."""
    compiler = GrammarCompiler(path, vocab_size)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    for name, text in {"in a string": '[{"name": "Lo', "between values": '[{"name": "Lo", "age": 3,'}.items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        cells = []
        for batch in (1, 8, 32):
            rules = SlotRules(
                vocab_start=0,
                slice_size=vocab_size,
                boundary=Boundary(torch.device("cpu")),
                compiler=compiler,
            )
            spec = SamplingSpec(structured_outputs=StructuredOutputs.of(json=SCHEMA), grammar_end_ids=(EOS,))
            for slot in range(batch):
                rules.admit(
                    Admission(
                        slot=slot,
                        admission=1,
                        limit=1000,
                        prompt_len=0,
                        seed=0,
                        sampling=spec,
                        history=np.array(ids[:-3], np.int32),
                    )
                )
            drafts = torch.tensor(ids[-3:] * batch)
            preceding = Preceding(
                tokens=drafts,
                first=np.repeat(np.arange(batch) * 3, 4),
                count=np.tile(np.arange(4), batch),
            )
            slots, positions = np.repeat(np.arange(batch), 4), np.tile(np.arange(4), batch) + len(ids)
            logits = torch.zeros(4 * batch, vocab_size)
            gathered, applied = [], []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(gathered) < 10:
                began = time.perf_counter()
                found = rules.gather(slots, positions, preceding)
                between = time.perf_counter()
                assert found is not None
                found.apply(logits)
                applied.append(time.perf_counter() - between)
                gathered.append(between - began)
            cells.append(f"{1e3 * statistics.median(gathered):8.2f} +{1e3 * statistics.median(applied):6.2f}")
        print(f"{vocabulary:10}{name:16}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def large_vocabulary(folder: Path) -> Path:
    """A byte-level tokenizer of 128 k tokens: made of random syllables, for its size alone."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzABCDEFGH.,:\"'{}[]0123456789"))
    original = json.loads((BUNDLED_CHECKPOINT / "tokenizer.json").read_text())
    vocab: dict[str, int] = original["model"]["vocab"]
    while len(vocab) < 128_000:
        word = "".join(rng.choice(letters, rng.integers(3, 9)))
        vocab.setdefault(("Ġ" if rng.random() < 0.5 else "") + word, len(vocab))
    (folder / "tokenizer.json").write_text(json.dumps(original))
    return folder


def main() -> None:
    import tempfile

    parser = harness.parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="per cell of masks")
    args = parser.parse_args()
    print(harness.machine())
    torch.set_num_threads(1)
    print("batch  drafts  grammar       ms a step  ms a token  accepted  tokens a verify")
    for batch in args.batches:
        for drafts in args.drafts:
            steps(batch, drafts, args.repeats)
    print("ms of masks of 4 rows each + of applying them, one thread, float32; batch 1, 8, 32")
    masks("6144", BUNDLED_CHECKPOINT, 6144, args.seconds)
    with tempfile.TemporaryDirectory() as folder:
        masks("128000", large_vocabulary(Path(folder)), 128_000, args.seconds)


if __name__ == "__main__":
    main()
