"""`serve --detach`: what it starts outlives it, recovers, takes orders, and ends with `stop`, all of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from cluster.launch.ray_keeper import descendants
from tests.support.cli_process import SMALL, command, run
from tests.support.ray_head import RayCluster, ray_head

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.slow]

LEFT = """
import json, ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
groups = [g for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
print(json.dumps([ray.util.list_named_actors(all_namespaces=True), len(groups)]))
"""


@pytest.fixture(scope="module")
def head() -> Iterator[RayCluster]:
    with ray_head(num_cpus=4) as cluster:
        yield cluster


def latentray(head: RayCluster, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*argv), env=head.env, capture_output=True, text=True, timeout=240)


def answer(server: str) -> list[int]:
    flags = ("--json", "--temperature", "0", "--max-tokens", "20", "The king")
    done = run("generate", "--server", server, *flags)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout)["token_ids"])


def shards() -> list[int]:
    """Those of the head's node."""
    found = []
    for pid in descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                found += [pid] if "ShardActor" in file.read() else []
        except OSError:
            continue  # it has ended meanwhile
    return found


def test_without_a_cluster_it_says_how_to_get_one() -> None:
    done = run("serve", "--detach", *SMALL)
    assert done.returncode == 2
    assert "`ray start --head`, and pass --address auto" in done.stderr


def test_it_outlives_its_command_and_a_shard_and_ends_with_stop(head: RayCluster) -> None:
    ray = ("--address", head.address)
    done = latentray(head, "stop", *ray)
    assert (done.returncode, "no detached deployment runs" in done.stderr) == (4, True), done.stderr

    flags = ("--name", "one", "--port", "0", "--num-groups", "2", "--dtype", "float64", *SMALL)
    done = latentray(head, "serve", "--detach", *ray, *flags)
    assert done.returncode == 0, done.stderr
    match = re.search(r"one is serving at (\S+) ", done.stdout)
    assert match, done.stdout
    assert f"latentray stop one --address {head.address}" in done.stdout
    server = match[1]
    expected = answer(server)

    done = latentray(head, "serve", "--detach", *ray, *flags)
    assert done.returncode == 2
    assert "a deployment named one runs" in done.stderr
    done = latentray(head, "status", *ray, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert (status["server"], len(status["groups"])) == (server, 2)
    assert status["model"]["served_model_name"] == "tiny-dsa"

    before = shards()
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    deadline_s = time.monotonic() + 60
    while before[0] in (now := shards()) or len(now) < 2:
        assert time.monotonic() < deadline_s, now
        time.sleep(0.2)
    assert answer(server) == expected
    done = latentray(head, "restart", "1", *ray)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["group 1: serving"]), done.stderr
    done = latentray(head, "drain", "7", *ray)
    assert (done.returncode, "there is no group 7" in done.stderr) == (2, True), done.stderr
    assert answer(server) == expected

    done = latentray(head, "stop", *ray)
    assert (done.returncode, done.stdout) == (0, "latentray: one has ended\n"), done.stderr
    assert run("status", "--server", server).returncode == 4
    assert left(head) == [[], 0]
    assert shards() == []


def left(head: RayCluster) -> list[object]:
    """Named actors and placement groups of the cluster."""
    argv = [sys.executable, "-c", LEFT, head.address]
    done = subprocess.run(argv, env=head.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def test_a_start_that_fails_leaves_nothing(head: RayCluster) -> None:
    done = latentray(
        head, "serve", "--detach", "--address", head.address, "--port", "0", "-tp", "2", "-dcp", "2", *SMALL,
        "--num-groups", "2",
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert "could not place the group" in done.stderr
    assert "Traceback" not in done.stderr
    assert left(head) == [[], 0]
