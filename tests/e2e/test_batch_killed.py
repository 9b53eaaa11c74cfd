"""A batch whose process is killed twice: 200 rows in each run of the tests, 10,000 with --all-cases."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster.batch.progress import read_progress
from tests.support.cli_process import ROOT, environment, run

pytestmark = pytest.mark.e2e

ENGINE = ("--executor", "inline", "--max-model-len", "128", "--num-kv-blocks", "160", "--max-num-seqs", "16")
STARTS = ("The king", "The SELECT statement", "A happy dog", "In the year 1900")


def write_rows(path: Path, num_rows: int) -> list[str | None]:
    """1 % of them bad, in four ways. Returns their custom_ids; None: a row that is no JSON."""
    rng = random.Random(0)
    lines, ids = [], []
    for i in range(num_rows):
        start = rng.choice(STARTS)
        body: dict[str, Any] = {"prompt": f"{start} number {i}", "max_tokens": 2 + i % 5, "temperature": 0.8}
        custom_id: str | None = f"row-{i}"
        if i % 100 == 37:
            kind = i // 100 % 4
            body |= ({"top_p": 7}, {"prompt": "word " * 500}, {"nosuch": 1}, {})[kind]
            custom_id = None if kind == 3 else custom_id
        row = {"custom_id": custom_id, "url": "/v1/completions", "body": body}
        lines.append("{broken" if custom_id is None else json.dumps(row))
        ids.append(custom_id)
    path.write_text("\n".join(lines))
    return ids


def killed_after(num_done: int, argv: tuple[str, ...], journal: Path) -> dict[str, int]:
    """kill -9 the command once so many rows are done. Returns the run of each row in the journal."""
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster", *argv],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not journal.exists() or read_progress(journal).num_done < num_done:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.005)
    finally:
        process.kill()
        process.wait()
    assert read_progress(journal).state == "interrupted"
    return runs_of(journal)


def unmake(journal: Path, out: Path) -> None:
    """As if the last run had been killed after its last row, before it made the output."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert "whole" in lines[-1]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines if "whole" not in line))
    out.rename(out.with_name("out.jsonl.partial"))


def runs_of(journal: Path) -> dict[str, int]:
    records = []
    for line in journal.read_text().splitlines():
        if line.endswith("}"):  # the last one may be torn
            records.append(json.loads(line))
    return {r["custom_id"]: r["run"] for r in records if r.get("custom_id") is not None}


def answers(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["response"]["body"].pop("created", None)
        # Which tokens a prefix cache has depends on what was asked before.
        row["response"]["body"].get("usage", {}).pop("prompt_tokens_details", None)
    return rows


def test_killed_twice_it_ends_as_if_undisturbed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    num_rows = 10_000 if request.config.getoption("--all-cases") else 200
    source, out, undisturbed = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "undisturbed.jsonl"))
    ids = write_rows(source, num_rows)
    journal = tmp_path / "out.jsonl.journal"
    argv = ("batch", "-i", str(source), "-o", str(out), *ENGINE)
    first = killed_after(num_rows // 4, argv, journal)
    second = killed_after(num_rows // 2, argv, journal)
    assert not out.exists()
    limit_s = 60 + num_rows / 5
    done = run(*argv, timeout_s=limit_s)
    assert done.returncode == 3, done.stderr
    assert f"going on: {len(second)} rows" in done.stderr
    assert f"{num_rows} rows, {num_rows // 100} failed" in done.stderr

    assert [row["custom_id"] for row in answers(out)] == ids, "exactly one row for each row, in their order"
    plain = run("batch", "-i", str(source), "-o", str(undisturbed), *ENGINE, timeout_s=limit_s)
    assert plain.returncode == 3, plain.stderr
    assert answers(out) == answers(undisturbed)
    errors = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert len(errors) == num_rows // 100
    assert all(row["error"]["message"] for row in errors)

    unmake(journal, out)
    done = run(*argv, timeout_s=limit_s)
    assert done.returncode == 3, done.stderr
    assert f"going on: {len(ids) - ids.count(None)} rows" in done.stderr
    assert "loading the model" not in done.stderr, "every row is answered: no engine is needed"
    assert answers(out) == answers(undisturbed)

    last = runs_of(journal)
    assert {name: last[name] for name in first} == first, "what the first run has done was not done again"
    assert {name: last[name] for name in second} == second
    counts = Counter(last.values())
    assert sorted(counts) == [1, 2, 3]
    assert counts[1] >= num_rows // 4 - num_rows // 100
    assert sum(counts.values()) == len([name for name in ids if name is not None])
