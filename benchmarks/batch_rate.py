"""Rows per second of a batch, journal and files included, against loops over `LLM.generate`.

    python -m benchmarks.batch_rate [--rows 200] [--tokens 16] [--requests 16] [--rounds 3]

Rows share beginnings, four of them, and their lengths differ. "Row by row" is a loop that calls
`LLM.generate` for each row; "in one call" hands it all of them, held in memory. The three take turns; medians
count. Then the journal alone: rows written a second, without an engine.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import harness
from cluster import LLM, SamplingParams
from cluster.batch.inputs import BatchInput
from cluster.batch.plan import FilePlan, plan_output
from cluster.batch.runner import run_batch

STARTS = ("The king", "The SELECT statement", "A happy dog", "In the year 1900")


def prompts_of(num_rows: int, tag: int) -> list[str]:
    """Other ones for each tag, so that no round finds another's in the prefix cache."""
    return [f"{STARTS[i % 4]} {'and ' * (i % 13)}number {i} of {tag}" for i in range(num_rows)]


def tokens_of(index: int, num_tokens: int) -> int:
    return 1 + (index * 7) % (2 * num_tokens - 1)


def row_by_row(llm: LLM, prompts: list[str], num_tokens: int) -> None:
    for i, prompt in enumerate(prompts):
        llm.generate(prompt, params(tokens_of(i, num_tokens)), use_tqdm=False)


def in_one_call(llm: LLM, prompts: list[str], num_tokens: int) -> None:
    each = [params(tokens_of(i, num_tokens)) for i in range(len(prompts))]
    llm.generate(prompts, each, use_tqdm=False)


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def as_batch(llm: LLM, prompts: list[str], num_tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.jsonl"
        rows = [
            {
                "custom_id": str(i),
                "url": "/v1/completions",
                "body": {
                    "prompt": prompt,
                    "temperature": 0,
                    "max_tokens": tokens_of(i, num_tokens),
                    "ignore_eos": True,
                },
            }
            for i, prompt in enumerate(prompts)
        ]
        source.write_text("\n".join(map(json.dumps, rows)))
        plan = plan_output(f"{folder}/out.jsonl", errors=None, journal=None)
        assert isinstance(plan, FilePlan)
        read = BatchInput(str(source))
        with plan.open(read, settings={}, restart=False) as work:
            work.begin(num_rows=len(rows))
            summary = run_batch(
                read.rows(),
                work,
                engine=llm.engine,
                frontend=llm.frontend,
                max_in_flight=2 * llm.group_config.max_num_seqs,
            )
            work.finish()
        assert summary.num_failed == 0


def journal_rate(num_rows: int) -> float:
    """Rows of 1 KiB a second."""
    row = json.dumps({"custom_id": "x", "response": {"text": "y" * 1000}, "error": None})
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_output(f"{folder}/out.jsonl", errors=None, journal=None)
        assert isinstance(plan, FilePlan)
        (Path(folder) / "in.jsonl").touch()
        start_s = time.perf_counter()
        with plan.open(BatchInput(f"{folder}/in.jsonl"), settings={}, restart=False) as work:
            work.begin(num_rows=num_rows)
            for i in range(num_rows):
                work.add(i, row, custom_id=f"row-{i}", key=i.to_bytes(16, "big"), failed=False)
            work.finish()
        return num_rows / (time.perf_counter() - start_s)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16, help="Of a row, mean.")
    parser.add_argument("--requests", type=int, default=16, help="max_num_seqs")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--journal-rows", type=int, default=20_000)
    args = parser.parse_args()
    print(harness.machine())
    ways: dict[str, Callable[[LLM, list[str], int], None]] = {
        "row by row": row_by_row,
        "in one call": in_one_call,
        "batch": as_batch,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": "64M", "max_num_seqs": args.requests}
    with LLM(executor="inline", **settings) as llm:
        for number in range(args.rounds + 1):
            for index, (way, work) in enumerate(ways.items()):
                prompts = prompts_of(args.rows, 10 * number + index)
                start_s = time.perf_counter()
                work(llm, prompts, args.tokens)
                seconds[way].append(time.perf_counter() - start_s)
    medians = {way: statistics.median(found[1:]) for way, found in seconds.items()}  # the first warms up
    for way, median_s in medians.items():
        ratio = medians["row by row"] / median_s
        print(f"{way:12} {args.rows / median_s:7.1f} rows/s, {ratio:.2f} x a loop row by row")
    print(f"{'journal':12} {journal_rate(args.journal_rows):7.0f} rows/s of 1 KiB, no engine")


if __name__ == "__main__":
    main()
