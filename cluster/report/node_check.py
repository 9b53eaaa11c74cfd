"""What one node of a cluster has, looked at from there. Needs the standard library alone."""

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Found by a process that Ray started on the node."""

    python: str
    executable: str
    missing: tuple[str, ...]
    """Distributions that are not installed there."""
    memory_bytes: int
    """Available for processes."""
    shared_memory_bytes: int
    """Free in /dev/shm."""
    has_model: bool
    """The checkpoint's directory is there and can be read."""


def look(distributions: Sequence[str], model_path: str | None) -> NodeFacts:
    """model_path: None where the checkpoint travels with the code."""
    missing = []
    for name in distributions:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    shared = Path("/dev/shm")
    return NodeFacts(
        python=platform.python_version(),
        executable=sys.executable,
        missing=tuple(missing),
        memory_bytes=_available_memory_bytes(),
        shared_memory_bytes=shutil.disk_usage(shared).free if shared.is_dir() else 0,
        has_model=model_path is None or os.access(Path(model_path) / "config.json", os.R_OK),
    )


def _available_memory_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
