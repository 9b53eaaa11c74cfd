"""A batch over a cluster whose driver is killed, then, in its next run, the node that its group is on."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.batch.progress import read_progress
from tests.support.cli_process import SMALL
from tests.support.network_cluster import NetworkCluster, missing_requirement

_MISSING = missing_requirement()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING)),
]


def row(number: int) -> str:
    """1 % of them bad."""
    body = {"prompt": f"The king number {number}", "max_tokens": 2 + number % 5, "temperature": 0.8}
    if number % 100 == 37:
        body["top_p"] = 7
    row = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(row) + "\n"


def wait_until(condition: Callable[[], bool], errors: Path) -> None:
    deadline_s = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline_s, errors.read_text()
        time.sleep(0.05)


def test_every_row_is_answered_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    num_rows = 10_000 if request.config.getoption("--all-cases") else 200
    source, out, errors = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "driver.stderr"
    journal = Path(f"{out}.journal")
    source.write_text("".join(map(row, range(num_rows))))
    batch = (sys.executable, "-m", "cluster", "batch", "--address", "auto", "-tp", "2", *SMALL)
    argv = (*batch, "-i", str(source), "-o", str(out))

    def is_done(num_done: int) -> bool:
        return journal.exists() and read_progress(journal).num_done >= num_done

    def runs() -> dict[str, int]:
        lines = journal.read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]  # the last one may be torn
        return {r["custom_id"]: r["run"] for r in records if "key" in r}

    # Either worker has room for the whole group; the driver is on a head without CPUs.
    with NetworkCluster(tmp_path, num_cpus=(0, 3, 3)) as cluster:
        driver = cluster.start(0, *argv)
        wait_until(lambda: is_done(num_rows // 4), errors)
        listed = cluster.run(0, "ps", "-eo", "pid,args").stdout.splitlines()
        [pid] = [line.split()[0] for line in listed if "-m cluster batch" in line]
        cluster.run(0, "kill", "-9", pid)
        driver.wait(30)
        first = runs()
        assert num_rows // 4 <= len(first) < num_rows

        driver = cluster.start(0, *argv)
        wait_until(lambda: is_done(num_rows // 2), errors)
        [node] = [n for n in (1, 2) if "ShardActor" in cluster.run(n, "ps", "-eo", "args").stdout]
        second = runs()
        assert len(second) < num_rows
        cluster.kill(node)
        assert driver.wait(1800) == 3, errors.read_text()

    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["custom_id"] for r in rows] == [f"row-{n}" for n in range(num_rows)]
    assert sum(r["error"] is not None for r in rows) == num_rows // 100
    last = runs()
    assert {name: last[name] for name in first} == first, "what the first run has done was not done again"
    assert {name: last[name] for name in second} == second
    assert set(Counter(last.values())) == {1, 2}
