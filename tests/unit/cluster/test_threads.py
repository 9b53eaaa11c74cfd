"""`--threads`: cores shared out among shards, and never more than there are."""

import os
from pathlib import Path

import pytest

from cluster.config import EngineArgs, ServeArgs, cores, load_settings
from cluster.config.cores import threads_of_shard, usable_cores
from cluster.config.resolve import resolve
from kernels_integration.errors import ConfigError


def machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, cores_of_cpus: list[tuple[int, int]], usable: set[int]
) -> Path:
    """A tree as /sys/devices/system/cpu has it: (package, core) of each CPU."""
    for cpu, (package, core) in enumerate(cores_of_cpus):
        place = folder / "cpus" / f"cpu{cpu}" / "topology"
        place.mkdir(parents=True)
        (place / "physical_package_id").write_text(f"{package}\n")
        (place / "core_id").write_text(f"{core}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: usable)
    return folder / "cpus"


def cgroup(folder: Path, lines: str, files: dict[str, str]) -> tuple[Path, Path]:
    root = folder / "cgroups"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (folder / "own").write_text(lines)
    return root, folder / "own"


@pytest.mark.parametrize(
    ("cores_of_cpus", "usable", "expected"),
    [
        ([(0, 0), (0, 1)], {0, 1}, 2),
        ([(0, 0), (0, 1), (0, 0), (0, 1)], {0, 1, 2, 3}, 2),  # two hardware threads a core
        ([(0, 0), (0, 1), (1, 0), (1, 1)], {0, 1, 2, 3}, 4),  # two sockets number alike
        ([(0, 0), (0, 1), (0, 2), (0, 3)], {1, 3}, 2),  # taskset
        ([(0, 0), (0, 1), (0, 0), (0, 1)], {0, 2}, 1),
    ],
)
def test_physical_cores_within_the_affinity(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores_of_cpus: list[tuple[int, int]],
    usable: set[int],
    expected: int,
) -> None:
    topology = machine(tmp_path, monkeypatch, cores_of_cpus=cores_of_cpus, usable=usable)
    assert usable_cores(topology, tmp_path, tmp_path / "none") == expected


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/pod/box\n", {"pod/box/cpu.max": "max 100000\n", "pod/cpu.max": "300000 100000\n"}, 3),
        ("0::/pod/box\n", {"pod/box/cpu.max": "250000 100000\n", "pod/cpu.max": "800000 100000\n"}, 2),
        ("0::/pod/box\n", {"pod/box/cpu.max": "20000 100000\n"}, 1),  # less than one is one
        ("0::/host/path\n", {"cpu.max": "200000 100000\n"}, 2),  # a container sees the root alone
        ("0::/\n", {}, 8),
        (
            "3:cpu,cpuacct:/box\n",
            {"cpu/box/cpu.cfs_quota_us": "400000\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            4,
        ),
        (
            "3:cpu,cpuacct:/box\n",
            {"cpu/box/cpu.cfs_quota_us": "-1\n", "cpu/box/cpu.cfs_period_us": "100000\n"},
            8,
        ),
        ("2:memory:/box\n", {"memory/box/cpu.cfs_quota_us": "100000\n"}, 8),
    ],
)
def test_quotas_of_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, files: dict[str, str], expected: int
) -> None:
    eight = [(0, core) for core in range(8)]
    topology = machine(tmp_path, monkeypatch, cores_of_cpus=eight, usable=set(range(8)))
    assert usable_cores(topology, *cgroup(tmp_path, lines, files)) == expected


def test_cores_are_never_lent_twice() -> None:
    for num_cores in range(1, 65):
        for num_shards in range(1, 65):
            threads = threads_of_shard(num_cores, num_shards)
            assert threads == 1 or threads * num_shards <= num_cores < (threads + 1) * num_shards


def test_a_group_gets_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("cluster.config.resolve.usable_cores", lambda: 8)
    assert cores.usable_cores() >= 1
    assert resolve(EngineArgs()).num_threads == 1
    assert resolve(EngineArgs(threads=None)).num_threads == 8
    assert resolve(EngineArgs(threads=None, tensor_parallel_size=2)).num_threads == 4
    assert resolve(ServeArgs(threads=None, tensor_parallel_size=2, num_groups=3)).num_threads == 1
    assert resolve(EngineArgs(threads=3)).num_threads == 3
    assert resolve(EngineArgs(threads=None, tensor_parallel_size=4)).num_threads == 2
    assert load_settings(EngineArgs, {"threads": "auto"}, environ={}).args.threads is None
    # Of other nodes nothing is known here, and a reservation says what a shard may use.
    assert resolve(EngineArgs(threads=None, address="10.0.0.1:6379")).num_threads == 1
    assert resolve(EngineArgs(address="10.0.0.1:6379", threads=64)).num_threads == 64
    with pytest.raises(
        ConfigError, match=r"threads 5 for each of 2 shards .* 8 cores .* use auto, or 1 to 4"
    ):
        resolve(EngineArgs(threads=5, tensor_parallel_size=2))
    assert resolve(EngineArgs(threads=1, tensor_parallel_size=4)).num_threads == 1


@pytest.mark.parametrize("value", ["0", "many", "-1", "1.5"])
def test_other_words_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"threads .* a whole number from 1 to .*, or auto"):
        load_settings(EngineArgs, {"threads": value}, environ={})
