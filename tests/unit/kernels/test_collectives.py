"""Every transport against one reference, among threads."""

import errno
import os
import platform
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels_integration.collectives import Collectives, SoloCollectives, shared_memory
from kernels_integration.collectives.shared_memory import SharedMemoryCollectives
from kernels_integration.errors import CollectiveError, ConfigError
from tests.support.collective_ranks import (
    DTYPES,
    inputs,
    leftovers,
    needs_shared_memory,
    new_name,
    run_threads,
)

threaded = pytest.mark.parametrize(
    "transport", ["in_process", pytest.param("shared_memory", marks=needs_shared_memory)]
)


def reference_sum(parts: list[Tensor]) -> Tensor:
    """In rank order; bfloat16 in float32, rounded once."""
    exact = [part.float() if part.dtype == torch.bfloat16 else part for part in parts]
    total = exact[0].clone()
    for part in exact[1:]:
        total = total + part
    return total.to(parts[0].dtype)


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
