"""The cores that this process may use: physical ones, within its affinity and its cgroup's quota."""

import os
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")


def usable_cores(topology: Path = _TOPOLOGY, cgroups: Path = _CGROUPS, own: Path | None = None) -> int:
    """At least 1. Two hardware threads of one core count once: they share its arithmetic units.

    own: the file that tells this process's cgroups.
    """
    quota = _quota(cgroups, own or Path("/proc/self/cgroup"))
    return max(1, int(min(_physical_cores(topology), quota)))


def threads_of_shard(num_cores: int, num_shards: int) -> int:
    """What each of so many shards on one machine gets: the cores are shared out, never lent twice."""
    return max(1, num_cores // num_shards)


def _physical_cores(topology: Path) -> int:
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in usable:
        folder = topology / f"cpu{cpu}" / "topology"
        try:
            cores.add(((folder / "physical_package_id").read_text(), (folder / "core_id").read_text()))
        except OSError:
            return len(usable)  # not told here, as on macOS
    return len(cores)


def _quota(cgroups: Path, own: Path) -> float:
    """CPUs that the cgroups above and of this process allow; infinity where none does."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return float("inf")
    quotas = [float("inf")]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, read = cgroups / path.lstrip("/"), _unified
        elif "cpu" in controllers.split(","):
            folder, read = cgroups / "cpu" / path.lstrip("/"), _legacy
        else:
            continue
        # In a container the path may be that of the host, where only the root is seen.
        for place in (folder, *folder.parents):
            if not place.is_relative_to(cgroups):
                break
            quotas.append(read(place))
    return min(quotas)


def _unified(folder: Path) -> float:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota == "max" else int(quota) / int(period)


def _legacy(folder: Path) -> float:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if quota <= 0 else quota / period
