"""A group whose shards lie on two nodes, over gloo, in network namespaces."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.network_cluster import NetworkCluster, missing_requirement
from tests.support.ray_groups import inline_tokens, requests

_MISSING = missing_requirement()
pytestmark = [pytest.mark.ray, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]

DRIVER = str(Path(__file__).parents[1] / "support" / "two_node_driver.py")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NetworkCluster]:
    # One node has room for the coordinator and two shards, the other for the other two.
    with NetworkCluster(tmp_path, num_cpus=(3, 3)) as cluster:
        yield cluster


def test_streams_over_two_nodes_equal_those_of_one_rank(cluster: NetworkCluster) -> None:
    result = cluster.run(0, sys.executable, DRIVER)
    assert result.returncode == 0, result.stderr
    started, served, stopped = (json.loads(line) for line in result.stdout.splitlines())
    coordinator, *shards = started["ips"].values()
    assert set(shards) == {cluster.address(0), cluster.address(1)}
    # Ranks fill whole nodes, the coordinator's first: DCP sets (ranks 0-1 and 2-3) stay within a node here.
    assert shards == sorted(shards, key=lambda ip: ip != coordinator)
    assert started["collectives"] == "gloo"
    assert "py_modules" in started["package"], "the nodes did not get the driver's packages"
    assert served["tokens"] == inline_tokens(requests())
    assert stopped["stop_s"] < 10


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.product(1)
@pytest.mark.parametrize("fault", ["kill", "cut", "raylet"])
def test_a_lost_node_fails_live_requests_within_5_s(cluster: NetworkCluster, fault: str) -> None:
    driver = cluster.start(0, sys.executable, DRIVER, "watch")
    try:
        assert driver.stdout is not None
        coordinator_ip = json.loads(driver.stdout.readline())["ips"]["coordinator"]
        assert json.loads(driver.stdout.readline()) == {"live": True}
        if fault == "kill":
            cluster.kill(1)
        elif fault == "cut":
            cluster.cut(1)
        else:  # Ray's process of the node alone: the actors of the node end with it
            listed = cluster.run(1, "ps", "-eo", "pid,args").stdout.splitlines()
            [raylet] = [line.split()[0] for line in listed if re.search(r"/core/src/ray/\S*/?raylet ", line)]
            cluster.run(1, "kill", "-9", raylet)
        output, _ = driver.communicate("now\n", timeout=120)
    finally:
        driver.kill()
    lost, stopped = (json.loads(line) for line in output.splitlines())
    # Ray chooses the node of the coordinator; its front ends miss it, it misses its shards.
    assert ("shard" if coordinator_ip == cluster.address(0) else "the coordinator at") in lost["error"]
    assert lost["failed_s"] < 5
    assert lost["unhealthy_s"] < 5
    assert stopped["stop_s"] < 15


@pytest.mark.slow
@pytest.mark.product(0)
def test_a_lost_nodes_processes_are_started_on_another_and_streams_go_on(tmp_path: Path) -> None:
    """Three nodes of two CPUs: the group's three processes take two of them, the third is to spare."""
    with NetworkCluster(tmp_path, num_cpus=(2, 2, 2)) as cluster:
        driver = cluster.start(0, sys.executable, DRIVER, "outlive")
        try:
            assert driver.stdout is not None
            ips = json.loads(driver.stdout.readline())["ips"]
            assert json.loads(driver.stdout.readline()) == {"live": True}
            lost = next(node for node in (1, 2) if cluster.address(node) in ips.values())
            cluster.kill(lost)
            output, _ = driver.communicate("now\n", timeout=200)
        finally:
            driver.kill()
        assert driver.returncode == 0, (tmp_path / "driver.stderr").read_text()
        [outcome] = map(json.loads, output.splitlines())
        assert cluster.address(lost) not in outcome["ips"].values()
        assert outcome["tokens"] == inline_tokens(requests(400, ignore_eos=True))
