"""How groups start, fail and end: faults, stop, clusters too small, drivers that vanish."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.answering.group_client import GroupClient
from cluster.client import Client
from cluster.config import ServeArgs
from cluster.launch.group import GroupHandle, launch_group
from cluster.launch.ray_keeper import descendants
from cluster.launch.serving import start_server
from cluster.report.doctor import run_checks
from kernels_integration.errors import CheckpointError, ClusterTooSmallError, ConfigError, UnavailableError
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


@pytest.fixture
def lost_group() -> Iterator[GroupHandle]:
    """A group of its own for a test that breaks it."""
    config = dataclasses.replace(group_config(2, 1), max_restarts=0)
    with launch_group(config, address="local") as handle:
        yield handle


@pytest.mark.alone
async def test_without_restarts_a_killed_shard_fails_live_requests_and_is_named(
    lost_group: GroupHandle,
) -> None:
    async with GroupClient(lost_group.request_address, keys=lost_group.request_keys) as client:
        live = asyncio.create_task(served_tokens(client, requests(400, ignore_eos=True)))
        await eventually(lambda: client.stats is not None and client.stats.running == 6, 5)
        pids = lost_group.process_ids()
        os.kill(pids["shard 1"], signal.SIGKILL)
        start_s = time.monotonic()
        await eventually(lambda: not client.healthy, 5)
        assert time.monotonic() - start_s < 1.5
        with pytest.raises(UnavailableError):
            await live
        assert time.monotonic() - start_s < 5
        lost = rf"shard 1 on node \S+ \(process {pids['shard 1']}\) is lost: "
        await eventually(lambda: re.match(lost, client.message) is not None, 2)
        with pytest.raises(UnavailableError, match=lost):
            await served_tokens(client, requests()[:1])
        await eventually(lambda: lost_group.failure is not None, 2)
        assert client.stats is not None
        assert (client.stats.running, client.stats.waiting) == (0, 0)
        # Ray asks a process to end before it kills it.
        await eventually(lambda: not any(map(is_alive, (pids["shard 0"], pids["shard 1"]))), 20)
    start_s = time.monotonic()
    lost_group.stop()
    assert time.monotonic() - start_s < 10
    assert not is_alive(pids["coordinator"])


@pytest.mark.product(1)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stopped", ["shard 0", "shard 1", "coordinator"])
async def test_a_process_that_is_stopped_for_a_while_is_slow_and_not_dead(
    stopped: str, request: pytest.FixtureRequest
) -> None:
    # Longer than any silence that once was death; all cases: 20 s, then a step of more than a minute.
    pauses_s = (20.0, 65.0) if request.config.getoption("--all-cases") else (4.5,)
    if stopped == "coordinator":
        pauses_s = pauses_s[:1]
    config = dataclasses.replace(group_config(2, 1), step_timeout_s=1.0, heartbeat_timeout_s=120.0)
    with launch_group(config, address="local") as group:
        pids = group.process_ids()
        async with GroupClient(group.request_address, keys=group.request_keys, silence_s=60) as client:
            for pause_s in pauses_s:
                live = asyncio.create_task(served_tokens(client, requests(300, ignore_eos=True)))
                await eventually(lambda: client.stats is not None and client.stats.running == 6, 15)
                os.kill(pids[stopped], signal.SIGSTOP)
                try:
                    await asyncio.sleep(pause_s)
                    assert not live.done()
                    if stopped != "coordinator":
                        assert not client.healthy
                        assert "the running step has taken" in client.message
                finally:
                    os.kill(pids[stopped], signal.SIGCONT)
                assert {name: len(tokens) for name, tokens in (await live).items()} == {
                    asked.request_id: 300 for asked in requests()
                }
                await eventually(lambda: client.healthy, 5)
            assert group.failure is None
            assert client.stats.num_restarts == 0
            assert group.process_ids() == pids


async def test_two_groups_share_a_local_cluster_until_the_last_ends() -> None:
    first = launch_group(group_config(1, 1), address="local")
    second = launch_group(group_config(1, 1), address="local")
    first.stop()
    async with GroupClient(second.request_address, keys=second.request_keys) as client:
        assert (await served_tokens(client, requests(4)[:1])).keys() == {"0-0"}
    second.stop()
    assert not ray.is_initialized()


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def is_ours(pid: int) -> bool:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == os.getpid()


def assert_loopback_only(pids: list[int]) -> None:
    """No socket of these processes listens on an address that other machines reach."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd))
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.append(fields[1].partition(":")[0])
    assert len(listening) > 5, "Ray's daemons listen"
    # 127.0.0.1, ::ffff:127.0.0.1 and ::1, in words of the machine's byte order
    ours = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert set(listening) <= ours


def test_stop_leaves_no_process_no_file_and_no_memory() -> None:
    with launch_group(group_config(2, 2), address="local") as handle:
        pids = handle.process_ids()
        keeper = next(pid for pid, command in processes_with("ray_keeper.py").items() if is_ours(pid))
        folder = next(part for part in command_of(keeper).split() if part.startswith("/tmp/latentray-"))
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert len(processes_with(folder)) > 3
        assert_loopback_only([keeper, *descendants(keeper)])
        mapped = Path(f"/proc/{pids['shard 0']}/maps").read_text()
        assert "/dev/shm/latentray-" in mapped
        handle.stop()
        handle.stop()
    assert len(pids) == 3
    assert not any(map(is_alive, pids.values()))
    assert processes_with(folder) == {}
    assert not Path(folder).exists()
    for line in mapped.splitlines():
        if "/dev/shm/" in line:
            assert not Path(line.split(maxsplit=5)[5].removesuffix(" (deleted)")).exists(), line
    assert not ray.is_initialized()


def test_an_unreadable_checkpoint_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        launch_group(group_config(2, 1, model_path=str(tmp_path)), address="local")
    assert not ray.is_initialized()


def test_a_cluster_too_small_names_the_bundle_and_the_nodes() -> None:
    messages: list[str] = []
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        with pytest.raises(
            ClusterTooSmallError,
            match=r"5 bundles are needed, 3 fit, and the one of shard 2 \(1 CPU\) fits on no node: "
            r"node [\d.]+ has 3 of 3 CPUs free; add nodes",
        ):
            launch_group(
                dataclasses.replace(group_config(4, 1), placement_timeout_s=1.5), progress=messages.append
            )
        assert any("waiting for room in the Ray cluster" in message for message in messages)
        assert ray.is_initialized(), "a connection that was there before stays"
        assert ray.available_resources()["CPU"] == 3
    finally:
        ray.shutdown()


def test_a_group_starts_inside_the_placement_group_of_another_program() -> None:
    """One that would capture what its tasks start has no room for the group, which brings its own."""
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        room = ray.util.placement_group([{"CPU": 1}])

        @ray.remote(num_cpus=1)
        def work() -> list[str]:
            with launch_group(group_config(1, 1)) as group:
                return sorted(group.placement)

        inside = PlacementGroupSchedulingStrategy(room, placement_group_capture_child_tasks=True)
        started = work.options(scheduling_strategy=inside).remote()  # type: ignore[attr-defined]
        assert ray.get(started, timeout=120) == ["coordinator", "shard 0"]
        states = [table["state"] for table in ray.util.placement_group_table().values()]
        assert states.count("CREATED") == 1, "the other program's is left"
    finally:
        ray.shutdown()


def test_a_server_fits_on_a_node_with_exactly_the_cpus_of_its_group() -> None:
    """The gateway is part of the reservation, and takes none of them."""
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        args = ServeArgs(tensor_parallel_size=2, port=0, http_port=None, max_model_len=256, num_kv_blocks=64)
        [check] = [
            check for check in run_checks(args.model_copy(update={"address": "auto"})) if check.name == "ray"
        ]
        assert check.status == "ok"
        with start_server(args) as server:
            assert ray.available_resources().get("CPU", 0) == 0
            with Client(server.address) as client:
                assert client.health().healthy
            [group] = ray.util.placement_group_table().values()
            assert group["name"].startswith("tiny-dsa-")
            names = {
                actor["name"].partition("/")[2] for actor in ray.util.list_named_actors(all_namespaces=True)
            }
            assert names == {"coordinator", "epoch 0 process 0", "epoch 0 process 1", "gateway"}
    finally:
        ray.shutdown()


@pytest.mark.alone
def test_no_cluster_at_the_address_is_found_out_at_once() -> None:
    start_s = time.monotonic()
    with pytest.raises(UnavailableError, match=r"no Ray cluster can be joined at address 127\.0\.0\.1:1"):
        launch_group(group_config(1, 1), address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="Ray Client"):
        launch_group(group_config(1, 1), address="ray://127.0.0.1:10001")
    assert time.monotonic() - start_s < 10


def test_the_callers_sigterm_handler_stays() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        launch_group(group_config(1, 1), address="local").stop()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.product(1)
@pytest.mark.parametrize("ending", ["return", "raise", "terminate"])
def test_a_driver_that_ends_without_stop_leaves_nothing(tmp_path: Path, ending: str) -> None:
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import json, os, signal
            from tests.support.ray_groups import group_config
            from cluster.launch.group import launch_group

            handle = launch_group(group_config(1, 1), address="local")
            print(json.dumps(handle.process_ids()), flush=True)
            if {ending!r} == "raise":
                raise KeyError("the driver's own fault")
            if {ending!r} == "terminate":
                os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    # From another folder: the workers find the packages although neither it nor the script's has them.
    driver = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert driver.stdout.startswith("{"), driver.stderr
    pids = json.loads(driver.stdout)
    deadline_s = time.monotonic() + 15
    while any(map(is_alive, pids.values())):
        assert time.monotonic() < deadline_s, "actors outlive their driver"
        time.sleep(0.1)
