"""The memory that a group takes, before it is started: from the checkpoint's headers and the settings."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

from actors.config import GroupConfig
from actors.model.checkpoint import Checkpoint
from actors.model.config import ModelConfig
from actors.model.tensors import parameter_counts
from cluster.config.sizes import format_size
from cluster.report.kv_report import group_kv_bytes_per_token
from kernels_integration.errors import UnavailableError

MORE_MEMORY = "pass a smaller --kv-cache-memory-bytes, or more machines by --address"
KERNEL_BYTES = 220 * 2**20
"""The 256 compiled kernels that kernels_integration.reference.linear keeps, .84 MB on average: a shard of the
bundled model grew by 856 MB where it kept 1024, and where it keeps 256, steps of all shapes make it grow by
252 MB, of which 38 are no kernels. The native backend has none, nor has torch's on Intel's processors."""
_ITEM_SIZES = {"float32": 4, "float64": 8, "bfloat16": 2}


def num_parameters(config: GroupConfig) -> int:
    """Values of all tensors of the checkpoint; of dummy weights, of those that are made."""
    if config.load_format == "dummy":
        counts = parameter_counts(ModelConfig.from_pretrained(config.model_path))
        return counts.main + (counts.mtp if config.num_speculative_tokens else 0)
    with Checkpoint(config.model_path) as checkpoint:
        return sum(math.prod(checkpoint[name].shape) for name in checkpoint)


def memory_check(config: GroupConfig, address: str | None, num_groups: int = 1) -> tuple[bool, str]:
    """Whether weights and KV caches of all groups may fit, and what they take, in words.

    address: of the Ray cluster; only a group that this machine runs on its CPUs is judged by its memory.
    """
    weights = num_groups * num_parameters(config) * _ITEM_SIZES[config.dtype]
    num_slots = num_groups * config.tensor_parallel_size * config.num_kv_blocks * config.block_size
    cache = num_slots * group_kv_bytes_per_token(config)
    available = available_memory_bytes()
    detail = (
        f"weights {format_size(weights)} and KV cache {format_size(cache)}; "
        f"{format_size(available)} are available here"
    )
    is_here = (address or os.environ.get("RAY_ADDRESS") or "local") == "local" and config.device == "cpu"
    return not is_here or weights + cache <= available, detail


def require_memory(config: GroupConfig, *, address: str | None, num_groups: int = 1) -> None:
    """Before minutes of loading. Errors: UnavailableError where the groups cannot fit into this machine."""
    fits, detail = memory_check(config, address, num_groups)
    if not fits:
        raise UnavailableError(f"the memory does not suffice: {detail}; {MORE_MEMORY}")


def describe_memory(config: GroupConfig, resident_bytes: Mapping[str, int]) -> str:
    """What each actor of a group that has just started takes, and how far its shards may grow."""
    now = ", ".join(f"{name} {num_bytes / 2**20:.0f}M" for name, num_bytes in resident_bytes.items())
    if config.device != "cpu":
        return now
    return f"{now}; a shard grows by up to {KERNEL_BYTES / 2**20:.0f}M of kernels and the rows of one step"


def available_memory_bytes() -> int:
    """Memory that a process may still take: the machine's, or its container's where that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()) + _reclaimable_bytes(group / "memory.stat"))
    return free


def _reclaimable_bytes(statistics: Path) -> int:
    """Pages of files that nobody looks at count as used, and are given up first."""
    lines = statistics.read_text().splitlines() if statistics.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)
