"""Ranks of a collective as threads of one process, and their seeded inputs."""

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels_integration.collectives import Collectives, shared_memory
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.collectives.shared_memory import SharedMemoryCollectives

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
_names = itertools.count()

needs_shared_memory = pytest.mark.skipif(not shared_memory.is_supported(), reason="needs Linux on x86-64")


def new_name() -> str:
    return f"test-{os.getpid()}-{next(_names)}"


def leftovers() -> list[Path]:
    return list(Path("/dev/shm").glob(f"latentray-test-{os.getpid()}-*"))


def inputs(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def run_threads(transport: str, size: int, body: Callable[[Collectives], Any], **options: Any) -> list[Any]:
    """body's result, or the exception that it raised, per rank."""
    results: list[Any] = [None] * size
    name = new_name()
    in_process = InProcessCollectives.create(size, **options) if transport == "in_process" else []

    def run(rank: int) -> None:
        comm: Collectives | None = None
        try:
            if transport == "in_process":
                comm = in_process[rank]
            else:
                comm = SharedMemoryCollectives(name, rank, size, **{"buffer_bytes": 64, **options})
            results[rank] = body(comm)
        except Exception as error:
            results[rank] = error
        finally:
            if comm is not None:
                comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert leftovers() == []
    return results
