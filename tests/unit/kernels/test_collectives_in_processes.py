"""The transports among real processes: the results of threads, and the ends of peers."""

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels_integration.collectives import Collectives
from kernels_integration.collectives.shared_memory import SharedMemoryCollectives
from kernels_integration.collectives.torch_distributed import TorchCollectives
from kernels_integration.errors import CollectiveError
from tests.support.collective_ranks import (
    DTYPES,
    inputs,
    leftovers,
    needs_shared_memory,
    new_name,
    run_threads,
)


def _join(transport: str, key: str, rank: int, size: int, timeout_s: float) -> Collectives:
    if transport == "shared_memory":
        return SharedMemoryCollectives(key, rank, size, timeout_s=timeout_s, buffer_bytes=4096)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{key}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )
    group = torch.distributed.group.WORLD
    assert group is not None
    return TorchCollectives(group)


def _process(
    body: Callable[[Collectives], Any],
    transport: str,
    key: str,
    rank: int,
    size: int,
    timeout_s: float,
    out: Connection,
) -> None:
    torch.set_num_threads(1)
    comm = _join(transport, key, rank, size, timeout_s)
    try:
        out.send(body(comm))
    except CollectiveError as error:
        out.send(error)
    out.recv()  # the parent has all results: leave together
    comm.close()


def run_processes(
    transport: str,
    tmp_path: Path,
    size: int,
    body: Callable[[Collectives], Any],
    timeout_s: float = 30.0,
) -> list[Any]:
    """body's result or CollectiveError per rank; None of a rank that was killed."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "pytest", "hypothesis"])
    key = new_name() if transport == "shared_memory" else str(tmp_path / "store")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(
            target=_process, args=(body, transport, key, rank, size, timeout_s, pipes[rank][1]), daemon=True
        )
        for rank in range(size)
    ]
    results: list[Any] = [None] * size
    try:
        for process in processes:
            process.start()
        for rank, (parent_end, child_end) in enumerate(pipes):
            child_end.close()
            try:
                assert parent_end.poll(60), f"rank {rank} is silent"
                results[rank] = parent_end.recv()
            except EOFError:  # killed
                continue
        for parent_end, _ in pipes:
            with suppress(BrokenPipeError):
                parent_end.send(None)
        for process in processes:
            process.join(timeout=20)
    finally:
        for process in processes:
            process.kill()
    assert leftovers() == []
    return results


def _many_calls(comm: Collectives) -> list[bytes]:
    """Results as bytes; ranks are late by turns, and tensors are larger than the buffers by turns."""
    results = []
    for seed in range(60):
        x = inputs(comm.rank, (seed % 7, 1 + 331 * (seed % 5)), DTYPES[seed % len(DTYPES)], seed)
        if seed % 10 == comm.rank:
            time.sleep(0.003)
        result = comm.all_reduce(x) if seed % 3 else comm.all_gather(x)
        if seed % 4 == 1:
            entries = inputs(comm.rank, (comm.size, 1 + 97 * (seed % 6)), x.dtype, seed)
            result = comm.all_to_all(entries) if seed % 8 == 1 else comm.reduce_scatter(entries)
        results.append(result.contiguous().view(torch.uint8).numpy().tobytes())
    return results


@pytest.mark.parametrize("transport", [pytest.param("shared_memory", marks=needs_shared_memory), "gloo"])
def test_processes_equal_threads_bit_for_bit(transport: str, tmp_path: Path) -> None:
    expected = run_threads("in_process", 3, _many_calls)
    assert run_processes(transport, tmp_path, 3, _many_calls) == expected


def _race(comm: Collectives) -> int:
    """Counts wrong elements of many operations in a row, without anything in between."""
    wrong = 0
    for i in range(3000):
        x = torch.full((1 + i % 97,), float(i * (comm.rank + 1)))
        wrong += int((comm.all_reduce(x) != 3.0 * i).sum())
    return wrong


@needs_shared_memory
def test_two_processes_in_full_flight(tmp_path: Path) -> None:
    assert run_processes("shared_memory", tmp_path, 2, _race) == [0, 0]


def _be_killed(comm: Collectives) -> float:
    comm.all_reduce(torch.zeros(4))
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(CollectiveError):
        comm.all_reduce(torch.zeros(4))
    with pytest.raises(CollectiveError):
        comm.all_gather(torch.zeros(4))
    return time.monotonic() - start


@pytest.mark.parametrize("transport", [pytest.param("shared_memory", marks=needs_shared_memory), "gloo"])
def test_a_killed_peer_is_noticed_long_before_the_deadline(transport: str, tmp_path: Path) -> None:
    results = run_processes(transport, tmp_path, 3, _be_killed, timeout_s=60)
    assert results[1] is None
    assert results[0] < 5
    assert results[2] < 5


def _be_late(comm: Collectives) -> float:
    comm.all_reduce(torch.zeros(4))
    start = time.monotonic()
    if comm.rank == 0:
        comm.all_reduce(torch.zeros(4))
    return time.monotonic() - start


def test_gloo_gives_a_living_peer_up_at_the_deadline(tmp_path: Path) -> None:
    results = run_processes("gloo", tmp_path, 2, _be_late, timeout_s=2.0)
    assert isinstance(results[0], CollectiveError)
    assert results[1] < 2.0
