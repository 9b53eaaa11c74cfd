"""Microseconds per collective: gloo, shared memory and threads, by ranks, operation and size.

    python -m benchmarks.collectives [--ranks 2 4] [--rounds 5]

Every rank uses one thread. A figure is the best of the rounds, as rank 0 sees it; a round is long enough to
average over the turns that ranks take when there are fewer cores than ranks.
"""

import os
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import SimpleQueue

import torch
import torch.multiprocessing as mp

from benchmarks import harness
from kernels_integration.collectives import Collectives
from kernels_integration.collectives.in_process import InProcessCollectives
from kernels_integration.collectives.shared_memory import SharedMemoryCollectives, is_supported
from kernels_integration.collectives.torch_distributed import TorchCollectives

OPERATIONS = ("all_reduce", "all_gather")
SIZES = {"2 KB": 2 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20}
ROUND_S = 0.2

Figures = dict[tuple[str, str], float]


def measure(comm: Collectives, rounds: int) -> Figures:
    figures = {}
    for operation in OPERATIONS:
        call: Callable[[torch.Tensor], torch.Tensor] = getattr(comm, operation)
        for label, num_bytes in SIZES.items():
            x = torch.zeros(num_bytes // 4)
            repeats = torch.tensor([max(10, int(ROUND_S / seconds_per_call(call, x, 10)))])
            repeats = comm.all_gather(repeats)[0]  # rank 0 decides
            best = min(seconds_per_call(call, x, int(repeats)) for _ in range(rounds))
            figures[operation, label] = best * 1e6
    comm.all_gather(torch.zeros(1))
    return figures


def seconds_per_call(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call(x)
    return (time.perf_counter() - start) / repeats


def measure_threads(size: int, rounds: int) -> Figures:
    results: dict[int, Figures] = {}
    threads = [
        threading.Thread(target=lambda comm=comm: results.update({comm.rank: measure(comm, rounds)}))
        for comm in InProcessCollectives.create(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0]


def run_rank(
    rank: int, transport: str, key: str, size: int, rounds: int, results: "SimpleQueue[Figures]"
) -> None:
    torch.set_num_threads(1)
    comm: Collectives
    if transport == "shared memory":
        comm = SharedMemoryCollectives(key, rank, size)
    else:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{key}", rank=rank, world_size=size, timeout=timedelta(minutes=2)
        )
        group = torch.distributed.group.WORLD
        assert group is not None, "initialised above"
        comm = TorchCollectives(group)
    figures = measure(comm, rounds)
    if rank == 0:
        results.put(figures)
    comm.close()


def measure_processes(transport: str, size: int, rounds: int) -> Figures:
    results: SimpleQueue[Figures] = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        key = f"benchmark-{os.getpid()}" if transport == "shared memory" else f"{directory}/store"
        mp.spawn(run_rank, args=(transport, key, size, rounds, results), nprocs=size)
    return results.get()


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(harness.machine())
    torch.set_num_threads(1)
    print(f"microseconds per operation, {len(os.sched_getaffinity(0))} cores")
    print("ranks  operation   size   " + "".join(f"{t:>15}" for t in ("gloo", "shared memory", "threads")))
    for size in args.ranks:
        columns = [
            measure_processes("gloo", size, args.rounds),
            measure_processes("shared memory", size, args.rounds) if is_supported() else {},
            measure_threads(size, args.rounds),
        ]
        for key in columns[0]:
            cells = "".join(f"{column.get(key, float('nan')):15.0f}" for column in columns)
            print(f"{size:5}  {key[0]}  {key[1]:>5}  {cells}", flush=True)


if __name__ == "__main__":
    main()
