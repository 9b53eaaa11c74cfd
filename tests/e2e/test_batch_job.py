"""Batches as jobs of a running cluster: `ray job submit`, and `latentray submit` with the same outcome."""

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_process import ROOT, SMALL, command
from tests.support.cutting_proxy import CuttingProxy
from tests.support.ray_head import RayCluster, ray_head

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.slow, pytest.mark.alone]

WITNESSES = {
    "driver": "cluster/__main__.py",
    "shard": "actors/shard_actor.py",
    "coordinator": "actors/coordinator_actor.py",
}
"""Files of the submitted folder that write down where they were imported from."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[RayCluster]:
    with ray_head() as cluster:
        yield cluster


def test_a_submitted_folder_needs_no_installation(ray_cluster: RayCluster, tmp_path: Path) -> None:
    """Driver and actors run from the submitted folder, though the interpreter may know another latentray."""
    folder = tmp_path / "project"
    for package in ("cluster", "actors", "kernels_integration"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, file in WITNESSES.items():
        source = folder / file
        witness = f"open({str(tmp_path / name)!r}, 'w').write(__file__)"
        source.write_text(f"{witness}\n{source.read_text()}")
    rows = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"What is the capital of {name}?"}],
                "temperature": 0,
            },
        }
        for name in ("France", "Spain")
    ]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "out.jsonl"
    deadline_s = time.monotonic() + 60
    while True:
        done = ray_cluster.ray(
            *("job", "submit", "--address", ray_cluster.dashboard, "--working-dir", ".", "--"),
            *(sys.executable, "-m", "cluster", "batch", "-i", "in.jsonl", "-o", str(out), "-tp", "2", *SMALL),
            cwd=folder,
        )
        # A cluster that has just started takes no jobs yet.
        if "No available agent" not in done.stderr or time.monotonic() > deadline_s:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    texts = [a["response"]["body"]["choices"][0]["message"]["content"] for a in answers]
    assert texts == ["The capital of France is Paris.", "The capital of Spain is Madrid."]
    for name in WITNESSES:
        assert "working_dir_files" in (tmp_path / name).read_text()


def test_latentray_submit_is_the_same_and_goes_on_over_broken_connections(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """Through a proxy that cuts each of the first connections once the log has begun; Ray's own command, as
    printed, then finds nothing to do."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "The SELECT statement", "max_tokens": 24}
    rows = [{"custom_id": str(i), "url": "/v1/completions", "body": body | {"seed": i}} for i in range(20)]
    source.write_text("\n".join([*map(json.dumps, rows), "bad"]))
    words = ("batch", "-i", str(source), "-o", str(out), *SMALL)
    with CuttingProxy(int(ray_cluster.dashboard.rsplit(":", 1)[1]), when=b" s] ", num_cuts=2) as proxy:
        done = subprocess.run(
            command("submit", "--address", proxy.url, "--python", sys.executable, "--", *words),
            cwd=tmp_path,
            env=ray_cluster.env | {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "http://127.0.0.1:1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 3, done.stdout + done.stderr
    assert proxy.num_cut == 2
    log = done.stdout
    assert log.count("21 rows, 1 failed") == 1, "no line is lost, none comes twice"
    assert "has failed" in done.stderr
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [a["custom_id"] for a in answers] == [*map(str, range(20)), None]
    assert len({a["response"]["body"]["choices"][0]["text"] for a in answers[:-1]}) > 1

    [printed] = [line for line in done.stderr.splitlines() if line.strip().startswith("ray job submit")]
    argv = shlex.split(printed.replace(proxy.url, ray_cluster.dashboard))
    again = ray_cluster.ray(*argv[1:])
    assert "nothing to do" in again.stdout, again.stdout + again.stderr
    assert "exit code 3" in again.stdout + again.stderr
    assert [json.loads(line) for line in out.read_text().splitlines()] == answers


@pytest.mark.parametrize(
    ("tp", "code", "words"),
    [
        ("2", 0, "joined; all 4 bundles should fit now: node"),
        ("4", 4, "joined; 6 bundles are needed, 4 fit, and the one of shard 3 (1 CPU) fits on no node: node"),
    ],
)
def test_doctor_looks_at_the_cluster_that_would_be_joined(
    ray_cluster: RayCluster, tp: str, code: int, words: str
) -> None:
    flags = ("doctor", "--json", "--port", "0", "-tp", tp, "--address", ray_cluster.address)
    done = subprocess.run(
        command(*flags, *SMALL), cwd=ROOT, env=ray_cluster.env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stdout + done.stderr
    [check] = [c for c in json.loads(done.stdout) if c["name"] == "ray"]
    assert check["detail"].startswith(words)
    assert check["detail"].endswith("has 4 of 4 CPUs free")
