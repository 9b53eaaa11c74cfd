"""`serve` on a cluster as KubeRay makes it, with a head without CPUs, until a process of Ray's own dies."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli_process import SMALL
from tests.support.network_cluster import NetworkCluster, missing_requirement

_MISSING = missing_requirement()
pytestmark = [
    pytest.mark.ray,
    pytest.mark.alone,
    pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING)),
]

SERVER = "127.0.0.1:50051"
NOTICED_WITHIN_S = 5
"""A second on an idle machine; Ray itself takes 14 s (raylet) and 61 s (GCS)."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NetworkCluster]:
    # The worker has exactly the CPUs of a coordinator and two shards.
    with NetworkCluster(tmp_path, num_cpus=(0, 3)) as cluster:
        yield cluster


def latentray(cluster: NetworkCluster, *argv: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(0, sys.executable, "-m", "cluster", *argv)


def processes(cluster: NetworkCluster, node: int, text: str) -> list[int]:
    listed = cluster.run(node, "ps", "-eo", "pid,args").stdout.splitlines()[1:]
    return [int(line.split()[0]) for line in listed if re.search(text, line)]


@pytest.mark.slow
def test_a_node_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """As an autoscaler adds one, when it has seen what is asked for."""
    flags = ("--address", "auto", "--executor", "ray", "-tp", "2", "--placement-timeout", "200", *SMALL)
    errors_file = tmp_path / "driver.stderr"
    with NetworkCluster(tmp_path, num_cpus=(1, 3), num_late=1) as cluster:
        words = ("--temperature", "0", "--max-tokens", "5", "The king")
        generate = cluster.start(0, sys.executable, "-m", "cluster", "generate", *flags, *words)
        short = r"waiting for room .*3 bundles are needed, 1 fit, .* shard 0 .* 10\.77\.9\.10 has 1 of 1 CPUs"
        deadline_s = time.monotonic() + 90
        while not re.search(short, errors_file.read_text()):
            assert generate.poll() is None, errors_file.read_text()
            assert time.monotonic() < deadline_s, errors_file.read_text()
            time.sleep(0.1)
        cluster.join(1)
        out, _ = generate.communicate(timeout=180)
        assert (generate.returncode, bool(out)) == (0, True), errors_file.read_text()


@pytest.mark.slow
@pytest.mark.product(1)
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("gcs_server", r"Ray's control process \(GCS\) at 10\.77\.9\.10:6379 is gone"),
        ("raylet", r"Ray's process of this node \(raylet\), process \d+, has ended"),
    ],
)
def test_serve_from_a_head_without_cpus_until_ray_dies(
    cluster: NetworkCluster, tmp_path: Path, program: str, told: str
) -> None:
    flags = ("--address", "auto", "--port", "50051", "-tp", "2", "--log-dir", str(tmp_path / "logs"), *SMALL)
    server = cluster.start(0, sys.executable, "-m", "cluster", "serve", *flags)
    errors_file = tmp_path / "driver.stderr"
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "serving tiny-dsa" in line, errors_file.read_text()

        done = latentray(
            cluster,
            "generate",
            "--server",
            SERVER,
            "--chat",
            "--temperature",
            "0",
            "What is the capital of France?",
        )
        assert done.stdout == "The capital of France is Paris.\n", done.stderr
        status = json.loads(latentray(cluster, "status", "--server", SERVER, "--json").stdout)
        by_node = status["engine"]["actors_by_node"]
        assert by_node.pop(cluster.address(1)) == "coordinator, shards 0-1"
        assert list(by_node.values()) == [f"gateway at {SERVER}"]

        [ray_process] = processes(cluster, 0, rf"/core/src/ray/\S*/?{program} ")
        cluster.run(0, "kill", "-9", str(ray_process))
        start_s = time.monotonic()
        while not (found := re.search(rf"not serving: {told}", errors_file.read_text())):
            assert server.poll() is None, errors_file.read_text()
            assert time.monotonic() - start_s < NOTICED_WITHIN_S, errors_file.read_text()
            time.sleep(0.02)
        assert server.wait(30) == 4, errors_file.read_text()
    finally:
        server.kill()
    errors = errors_file.read_text()
    assert errors.rstrip().splitlines()[-1].startswith(f"latentray: {found[0].removeprefix('not serving: ')}")
    assert "Traceback" not in errors
    deadline_s = time.monotonic() + 10
    while any(processes(cluster, node, r"ray::(Shard|Coordinator|Gateway)Actor") for node in (0, 1)):
        assert time.monotonic() < deadline_s, "actors are left"
        time.sleep(0.2)
