"""Whoever asks - `LLM`, a batch, a server whose driver dies meanwhile - a lost process costs time alone."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from cluster import LLM, SamplingParams
from cluster.batch.progress import read_progress
from cluster.launch.ray_keeper import descendants
from tests.support.cli_process import ROOT, SMALL, command, environment, run
from tests.support.ray_groups import is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.slow]

EXACT = ("--dtype", "float64", *SMALL)
Found = TypeVar("Found")


def soon(find: Callable[[], Found | None], timeout_s: float = 90) -> Found:
    deadline_s = time.monotonic() + timeout_s
    while (found := find()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return found


def processes_of(parent: int, actor: str) -> set[int]:
    found = set()
    for pid in descendants(parent):
        try:
            found |= {pid} if actor in Path(f"/proc/{pid}/cmdline").read_text() else set()
        except OSError:
            continue  # it has ended meanwhile
    return found


def test_generate_of_a_program_goes_on() -> None:
    """A shard is killed, then the coordinator."""
    settings = {"max_model_len": 256, "num_kv_blocks": 64, "max_num_seqs": 8, "dtype": "float64"}
    prompts = ["The king", "What is", "Once upon a time", "A list"] * 4
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=200, ignore_eos=True)
    with LLM(executor="inline", **settings) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    found: list[list[tuple[int, ...]]] = []
    with LLM(executor="ray", address="local", max_restarts=5, **settings) as llm:

        def ask() -> None:
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params)])

        for actor in ("ShardActor", "CoordinatorActor"):
            asking = threading.Thread(target=ask)
            [victim] = processes_of(os.getpid(), actor)
            asking.start()
            time.sleep(0.5)
            assert asking.is_alive(), "it is not over yet"
            os.kill(victim, signal.SIGKILL)
            asking.join(120)
            assert processes_of(os.getpid(), actor).isdisjoint({victim})
    assert found == [expected, expected]


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        command(*argv),
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_batch_goes_on(tmp_path: Path) -> None:
    source, out, plain = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "plain.jsonl"))
    body = {"prompt": "The king", "max_tokens": 60, "temperature": 0.8, "ignore_eos": True}
    rows = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(60)
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("batch", "--executor", "inline", *EXACT, "-i", str(source), "-o", str(plain))
    assert done.returncode == 0, done.stderr
    journal = Path(f"{out}.journal")
    with started("batch", "--address", "local", *EXACT, "-i", str(source), "-o", str(out)) as batch:
        soon(lambda: (journal.exists() and read_progress(journal).num_done > 3) or None)
        [victim] = processes_of(batch.pid, "ShardActor")
        os.kill(victim, signal.SIGKILL)
        assert batch.wait(120) == 0
    assert texts(out) == texts(plain)


def texts(path: Path) -> dict[str, str]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in rows}


def test_a_driver_killed_while_its_group_recovers_leaves_nothing() -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    with started("serve", "--address", "local", "--port", "0", "-tp", "2", *SMALL) as serve:
        assert serve.stdout is not None
        match = re.search(r"serving tiny-dsa at (\S+) ", serve.stdout.readline())
        assert match
        shards = processes_of(serve.pid, "ShardActor")
        assert len(shards) == 2
        os.kill(min(shards), signal.SIGKILL)
        # Its successor has started, and loads: in the middle of the recovery.
        soon(lambda: processes_of(serve.pid, "ShardActor") - shards or None)
        everything = descendants(serve.pid)
        folders = {
            part
            for pid in everything
            for part in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if re.fullmatch(r"/tmp/latentray-\w+", part)
        }
        assert folders
        serve.kill()
        soon(lambda: None if any(map(is_alive, everything)) else True, 20)
    soon(lambda: None if any(Path(folder).exists() for folder in folders) else True, 20)
    left = {path.name for path in Path("/dev/shm").iterdir() if "latentray" in path.name} - before
    assert left == set()
