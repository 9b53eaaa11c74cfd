"""A gateway on each node: any of them answers by all groups, and one that dies takes nothing with it."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.network_cluster import NetworkCluster, missing_requirement

_MISSING = missing_requirement()
pytestmark = [pytest.mark.ray, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]

DRIVER = str(Path(__file__).parents[1] / "support" / "gateway_driver.py")


def test_a_dead_gateway_harms_no_stream_of_others_leaks_nothing_and_comes_back(tmp_path: Path) -> None:
    with NetworkCluster(tmp_path, num_cpus=(3, 3)) as cluster:
        result = cluster.run(0, sys.executable, DRIVER)
        told: dict[str, object] = {}
        for line in result.stdout.splitlines():
            told |= json.loads(line)
        assert result.returncode == 0, result.stderr
        ips = [cluster.address(0), cluster.address(1)]
        assert told["addresses"] == [f"{ip}:50051" for ip in ips]
        assert told["others_unharmed"]
        assert told["codes"] == ["unavailable"]
        assert told["used"] == [[0, 0, 0], [0, 0, 0]]
        assert told["elsewhere"]
        assert told["back"]
        assert told["failure"] is None
        actors = told["actors"]
        assert isinstance(actors, dict)
        for ip in ips:
            assert f"gateway at {ip}:50051" in actors[ip]
        assert told["stopped"]
