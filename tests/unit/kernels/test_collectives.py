"""Every transport against one reference, among threads and among real processes."""

import errno
import itertools
import multiprocessing as mp
import os
import platform
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_integration.collectives import Collectives, SoloCollectives, shared_memory
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.collectives.shared_memory import SharedMemoryCollectives
from kernels_integration.collectives.torch_distributed import TorchCollectives
from kernels_integration.errors import CollectiveError, ConfigError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
_names = itertools.count()

needs_shared_memory = pytest.mark.skipif(not shared_memory.is_supported(), reason="needs Linux on x86-64")
threaded = pytest.mark.parametrize(
    "transport", ["in_process", pytest.param("shared_memory", marks=needs_shared_memory)]
)


def new_name() -> str:
    return f"test-{os.getpid()}-{next(_names)}"


def leftovers() -> list[Path]:
    return list(Path("/dev/shm").glob(f"latentray-test-{os.getpid()}-*"))


def inputs(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def reference_sum(parts: list[Tensor]) -> Tensor:
    """In rank order; bfloat16 in float32, rounded once."""
    exact = [part.float() if part.dtype == torch.bfloat16 else part for part in parts]
    total = exact[0].clone()
    for part in exact[1:]:
        total = total + part
    return total.to(parts[0].dtype)


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


def settled(comm: Collectives) -> None:
    """Every rank has the results of all before; so closing disturbs nobody."""
    comm.all_gather(torch.zeros(1))


# Results


@threaded
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results(transport: str, size: int, dtype: torch.dtype) -> None:
    """From scalars to tensors of many pieces of the 64-byte buffers."""
    shapes = [(), (1,), (5,), (0, 3), (3, 7), (2, 3, 50)]

    def body(comm: Collectives) -> list[tuple[Tensor, ...]]:
        xs = [inputs(comm.rank, shape, dtype) for shape in shapes]
        entries = [inputs(comm.rank, (size, *shape), dtype, seed=1) for shape in shapes]
        return [
            (
                comm.all_reduce(x.clone()).clone(),
                comm.all_gather(x).clone(),
                comm.all_to_all(y).clone(),
                comm.reduce_scatter(y).clone(),
            )
            for x, y in zip(xs, entries, strict=True)
        ]

    results = run_threads(transport, size, body)
    for i, shape in enumerate(shapes):
        parts = [inputs(rank, shape, dtype) for rank in range(size)]
        entries = [inputs(rank, (size, *shape), dtype, seed=1) for rank in range(size)]
        for rank, result in enumerate(results):
            reduced, gathered, received, scattered = result[i]
            assert {t.dtype for t in result[i]} == {dtype}
            assert torch.equal(received, torch.stack([entry[rank] for entry in entries]))
            assert torch.equal(scattered, reference_sum([entry[rank] for entry in entries]))
            assert torch.equal(reduced, reference_sum(parts))
            assert torch.equal(gathered, torch.stack(parts))


operations = st.lists(
    st.tuples(
        st.sampled_from(["all_reduce", "all_gather", "all_to_all", "reduce_scatter"]),
        st.integers(0, 40),
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=12,
)


@threaded
@settings(max_examples=40, deadline=None)
@given(size=st.integers(2, 4), calls=operations)
def test_any_sequence_of_calls(transport: str, size: int, calls: list[tuple[str, int, torch.dtype]]) -> None:
    def body(comm: Collectives) -> list[Tensor]:
        results = []
        for seed, (operation, length, dtype) in enumerate(calls):
            shape = (size, length) if operation in ("all_to_all", "reduce_scatter") else (length,)
            x = inputs(comm.rank, shape, dtype, seed)
            results.append(getattr(comm, operation)(x).clone())
            x.zero_()
        return results

    results = run_threads(transport, size, body)
    for seed, (operation, length, dtype) in enumerate(calls):
        scatters = operation in ("all_to_all", "reduce_scatter")
        shape = (size, length) if scatters else (length,)
        inputs_of_all = [inputs(rank, shape, dtype, seed) for rank in range(size)]
        for rank, result in enumerate(results):
            parts = [x[rank] for x in inputs_of_all] if scatters else inputs_of_all
            is_sum = operation in ("all_reduce", "reduce_scatter")
            assert torch.equal(result[seed], reference_sum(parts) if is_sum else torch.stack(parts))


@threaded
def test_results_belong_to_their_rank(transport: str) -> None:
    """What one rank does to its input and results reaches no other."""

    def body(comm: Collectives) -> tuple[Tensor, Tensor]:
        reduced = comm.all_reduce(torch.full((4,), 1.0))
        x = torch.full((4,), float(comm.rank))
        gathered = comm.all_gather(x)
        settled(comm)
        if comm.rank == 0:
            reduced.fill_(-1)
            gathered.fill_(-1)
            x.fill_(-1)
        settled(comm)
        settled(comm)
        return reduced, gathered

    _, second, third = run_threads(transport, 3, body)
    for reduced, gathered in (second, third):
        assert torch.equal(reduced, torch.full((4,), 3.0))
        assert torch.equal(gathered, torch.arange(3.0)[:, None].expand(3, 4))


@threaded
def test_strided_input_and_inference_mode(transport: str) -> None:
    def body(comm: Collectives) -> list[Tensor]:
        results = []
        for mode in (True, False, True):
            with torch.inference_mode(mode):
                x = inputs(comm.rank, (4, 6), torch.float32)
                results += [comm.all_gather(x.t()).clone(), comm.all_reduce(x[:, 1]).clone()]
        return results

    parts = [inputs(rank, (4, 6), torch.float32) for rank in range(2)]
    for result in run_threads(transport, 2, body):
        for gathered, reduced in zip(result[::2], result[1::2], strict=True):
            assert torch.equal(gathered, torch.stack([part.t() for part in parts]))
            assert torch.equal(reduced, reference_sum([part[:, 1] for part in parts]))


def test_solo() -> None:
    x = inputs(0, (3,), torch.float32)
    assert torch.equal(SoloCollectives().all_reduce(x), x)
    assert torch.equal(SoloCollectives().all_gather(x), x[None])
    assert torch.equal(SoloCollectives().all_to_all(x[None]), x[None])
    assert torch.equal(SoloCollectives().reduce_scatter(x[None]), x)


# Failures


@threaded
def test_a_rank_that_never_arrives_fails_all(transport: str) -> None:
    waited = threading.Barrier(3)

    def body(comm: Collectives) -> None:
        settled(comm)
        try:
            if comm.rank == 1:
                return
            comm.all_reduce(torch.zeros(4))
        finally:
            waited.wait()  # nobody closes before all have failed

    start = time.monotonic()
    errors = run_threads(transport, 3, body, timeout_s=0.3)
    assert time.monotonic() - start < 5
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, CollectiveError)
    assert any("waited 0.3 s" in str(error) for error in (errors[0], errors[2]))


@threaded
def test_a_late_rank_fails_after_the_others_gave_up(transport: str) -> None:
    gave_up = threading.Event()

    def body(comm: Collectives) -> None:
        settled(comm)
        if comm.rank == 1:
            gave_up.wait(10)
        try:
            comm.all_reduce(torch.zeros(4))
        finally:
            gave_up.set()

    for error in run_threads(transport, 2, body, timeout_s=0.2):
        assert isinstance(error, CollectiveError)


@threaded
def test_a_closed_rank_releases_the_others_at_once(transport: str) -> None:
    def body(comm: Collectives) -> float:
        settled(comm)
        if comm.rank == 2:
            time.sleep(0.05)
            return 0.0
        start = time.monotonic()
        with pytest.raises(CollectiveError):
            comm.all_gather(torch.zeros(4))
        return time.monotonic() - start

    for result in run_threads(transport, 3, body, timeout_s=30):
        assert result < 2


@threaded
@pytest.mark.parametrize("fault", ["operation", "length", "dtype"])
def test_unequal_calls_fail_every_rank(transport: str, fault: str) -> None:
    def body(comm: Collectives) -> None:
        settled(comm)
        odd = comm.rank == 1
        x = torch.zeros(5 if odd and fault == "length" else 4)
        x = x.int() if odd and fault == "dtype" else x
        (comm.all_gather if odd and fault == "operation" else comm.all_reduce)(x)

    for error in run_threads(transport, 2, body, timeout_s=5):
        assert isinstance(error, CollectiveError)


@threaded
def test_a_closed_member_refuses(transport: str) -> None:
    def body(comm: Collectives) -> None:
        settled(comm)
        comm.close()
        comm.close()
        comm.all_reduce(torch.zeros(4))

    for error in run_threads(transport, 2, body):
        assert isinstance(error, CollectiveError)


# The segment of shared memory


@needs_shared_memory
@pytest.mark.parametrize("who", ["member", "outside"])
def test_abort_ends_a_wait(who: str) -> None:
    name = new_name()
    waiting, aborted = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def run(rank: int) -> None:
        comm = SharedMemoryCollectives(name, rank, 2, timeout_s=30)
        if rank == 1:
            waiting.set()
            try:
                comm.all_reduce(torch.zeros(4))
            except CollectiveError as error:
                caught.append(error)
        else:
            waiting.wait()
            time.sleep(0.05)
            shared_memory.abort(name) if who == "outside" else comm.abort()
            aborted.wait(10)
        comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    start = time.monotonic()
    threads[1].join(timeout=10)
    aborted.set()
    threads[0].join(timeout=10)
    assert time.monotonic() - start < 5
    assert len(caught) == 1
    assert "abort" in str(caught[0])
    assert leftovers() == []


@needs_shared_memory
@pytest.mark.parametrize("rank", [0, 1])
def test_joining_ends_when_a_rank_is_missing_or_the_set_is_aborted(rank: int) -> None:
    with pytest.raises(CollectiveError, match=r"waited 0\.1 s"):
        SharedMemoryCollectives(new_name(), rank, 2, timeout_s=0.1)
    assert leftovers() == []
    name = new_name()
    shared_memory.abort(name)
    with pytest.raises(CollectiveError, match="aborted from outside"):
        SharedMemoryCollectives(name, rank, 2, timeout_s=20)
    shared_memory.remove(name)
    assert leftovers() == []


@needs_shared_memory
def test_a_name_in_use_is_refused_and_left_alone() -> None:
    path = Path(f"/dev/shm/latentray-{new_name()}")
    path.write_bytes(b"another set's")
    try:
        with pytest.raises(CollectiveError, match="name of its own"):
            SharedMemoryCollectives(path.name.removeprefix("latentray-"), 0, 2, timeout_s=1)
        assert path.read_bytes() == b"another set's"
    finally:
        path.unlink()


@needs_shared_memory
def test_ranks_must_agree_on_the_size() -> None:
    name, errors = new_name(), []

    def run(rank: int, size: int) -> None:
        try:
            SharedMemoryCollectives(name, rank, size, timeout_s=0.5)
        except CollectiveError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=run, args=args) for args in ((0, 2), (1, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert any("as one of 3, rank 0 as one of 2" in error for error in errors)
    assert leftovers() == []


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert not shared_memory.is_supported()
    with pytest.raises(ConfigError, match="aarch64; use gloo"):
        SharedMemoryCollectives(new_name(), 0, 1)


@needs_shared_memory
def test_no_room_is_a_message_and_not_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="no room"):
        SharedMemoryCollectives(new_name(), 0, 1)
    assert leftovers() == []


# Processes


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
