"""A local Ray: whose packages its workers import, and how the end of each process is told."""

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from cluster.answering.group_client import GroupClient
from cluster.launch.group import GroupHandle, launch_group
from cluster.launch.ray_keeper import descendants
from kernels_integration.errors import UnavailableError
from tests.support.ray_groups import (
    eventually,
    group_config,
    is_alive,
    processes_with,
    requests,
    served_tokens,
)

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]


def decoys(folder: Path) -> Path:
    """A folder as another checkout, or a user's own packages of the same names."""
    for name in ("cluster", "actors", "kernels_integration", "ray", "msgspec"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('the decoy {name} was imported')\n")
    return folder


def test_workers_import_the_drivers_packages_whatever_the_current_folder_holds(tmp_path: Path) -> None:
    # The script's own folder is on the driver's path, as with any script; the decoys are where it is started.
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            """
            from cluster.launch.group import launch_group
            from tests.support.ray_groups import group_config
            import os, ray

            @ray.remote(num_cpus=0)
            def home() -> str:
                import actors, cluster
                return f"{actors.__file__} {cluster.__file__} {os.getcwd()}"

            here = os.getcwd()
            with launch_group(group_config(1, 1), address="local") as group:
                print(ray.get(home.remote()), group.process_ids(), os.getcwd() == here, flush=True)
            """
        )
    )
    done = subprocess.run(
        [sys.executable, "-P", str(script)],
        cwd=decoys(tmp_path / "decoys"),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    actors_file, cluster_file, _ = done.stdout.split(maxsplit=2)
    assert actors_file == str(ROOT / "actors" / "__init__.py")
    assert cluster_file == str(ROOT / "cluster" / "__init__.py")
    assert done.stdout.rstrip().endswith("True"), "the driver is where it was"


@pytest.fixture
def group() -> Iterator[GroupHandle]:
    config = dataclasses.replace(group_config(1, 1), max_restarts=0)
    with launch_group(config, address="local") as handle:
        yield handle


def keeper() -> int:
    """The process that keeps this process's local Ray."""
    [pid] = [
        pid
        for pid in processes_with("ray_keeper.py")
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1] == str(os.getpid())
    ]
    return pid


def child_named(parent: int, program: str) -> int:
    [pid] = [pid for pid in descendants(parent) if Path(f"/proc/{pid}/comm").read_text().strip() == program]
    return pid


@pytest.mark.alone
@pytest.mark.product(1)
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("gcs_server", r"Ray's control process \(GCS\), process \d+, was killed by SIGKILL"),
        ("raylet", r"Ray's process of this node \(raylet\), process \d+, was killed by SIGKILL"),
    ],
)
async def test_the_death_of_ray_itself_is_noticed_at_once_and_leaves_nothing(
    group: GroupHandle, program: str, told: str
) -> None:
    holder = keeper()
    others = [holder, *descendants(holder)]
    folder = next(
        part
        for part in Path(f"/proc/{holder}/cmdline").read_text().split("\0")
        if Path(part).name.startswith("latentray-")
    )
    os.kill(child_named(holder, program), signal.SIGKILL)
    assert await eventually(lambda: group.failure is not None, 5) < 2
    assert group.failure is not None
    assert re.fullmatch(told, group.failure)
    start_s = time.monotonic()
    await asyncio.to_thread(group.stop)
    assert time.monotonic() - start_s < 10
    assert not any(map(is_alive, others))
    assert not Path(folder).exists()
    assert not ray.is_initialized()


CAUSES = [
    pytest.param(signal.SIGKILL, r"it was killed by SIGKILL: by hand, or by the kernel", id="SIGKILL"),
    pytest.param(signal.SIGSEGV, r"it was killed by SIGSEGV; its log tells where \(\S+\.log\)", id="SIGSEGV"),
]


@pytest.mark.product(2)
@pytest.mark.parametrize("name", ["coordinator", "shard 0"])
@pytest.mark.parametrize(("number", "cause"), CAUSES)
async def test_an_actor_that_dies_is_named_with_its_cause(
    group: GroupHandle, name: str, number: signal.Signals, cause: str
) -> None:
    pid = group.process_ids()[name]
    async with GroupClient(group.request_address, keys=group.request_keys) as client:
        live = asyncio.create_task(served_tokens(client, requests(400, ignore_eos=True)))
        await eventually(lambda: client.stats is not None and client.stats.running == 6, 20)
        os.kill(pid, number)
        with pytest.raises(UnavailableError):
            await live
        await eventually(lambda: group.failure is not None, 10)
    assert group.failure is not None
    assert re.fullmatch(rf"{name} on node 127\.0\.0\.1 \(process {pid}\) is lost: {cause}.*", group.failure)
