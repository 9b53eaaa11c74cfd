"""The message cost of a step: one StepInput to every shard, one StepOutput back, in real processes.

    python benchmarks/step_channel.py [--shards 2] [--requests 32] [--k 3] [--steps 2000]

The echo shards answer at once, so the round trip is encoding, sockets, wake-ups and decoding.
"""

import multiprocessing
import statistics
import time

import numpy as np

from actors.messages import StepInput, StepOutput
from actors.transport.step_channel import CoordinatorEnd, ShardEnd
from benchmarks import harness


def echo(address: str, rank: int, output: StepOutput) -> None:
    end = ShardEnd(address, rank)
    end.ready()
    while (step := end.receive()) is not None:
        if rank == 0:
            end.report(
                StepOutput(
                    epoch=step.epoch,
                    step=step.step,
                    drafts=output.drafts,
                    tokens=output.tokens,
                    length=output.length,
                )
            )
    end.close()


def decode_step(step: int, requests: int, k: int) -> StepInput:
    """A step of `requests` verifies of k drafts, as in steady decoding."""
    ints, bytes_ = np.arange(requests, dtype=np.int32), np.full(requests, k, np.uint8)
    none, indptr = np.zeros(0, np.int32), np.zeros(requests + 1, np.int32)
    accepted_indptr = np.arange(requests + 1, dtype=np.int32) * (k + 1)
    return StepInput(
        epoch=0,
        step=step,
        slot=ints,
        admission=ints,
        kind=bytes_,
        k=bytes_,
        fill=bytes_,
        start=ints,
        readonly=bytes_,
        ids=none,
        ids_indptr=indptr,
        new_blocks=ints,
        new_blocks_indptr=np.arange(requests + 1, dtype=np.int32),
        accepted=np.zeros(requests * (k + 1), np.int32),
        accepted_indptr=accepted_indptr,
    )


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    print(harness.machine())
    output = StepOutput(
        epoch=0,
        step=0,
        drafts=np.zeros(args.requests * args.k, np.int32),
        tokens=np.zeros(args.requests * (args.k + 1), np.int32),
        length=np.zeros(args.requests, np.int32),
    )
    end = CoordinatorEnd(args.shards)
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=echo, args=(end.address, rank, output), daemon=True)
        for rank in range(args.shards)
    ]
    for process in processes:
        process.start()
    while not end.is_ready:
        end.socket.poll(100)
        end.receive()
    round_trips_ms = []
    for number in range(args.steps):
        step = decode_step(number, args.requests, args.k)
        start_s = time.perf_counter()
        end.send(step)
        while not end.receive():
            end.socket.poll()
        round_trips_ms.append((time.perf_counter() - start_s) * 1000)
    end.stop_shards()
    for process in processes:
        process.join(5)
    end.close()
    warm = sorted(round_trips_ms[len(round_trips_ms) // 10 :])
    print(
        f"{args.shards} shards, {args.requests} requests, k {args.k}: "
        f"median {statistics.median(warm):.3f} ms, p10 {warm[len(warm) // 10]:.3f} ms, "
        f"p99 {warm[len(warm) * 99 // 100]:.3f} ms"
    )


if __name__ == "__main__":
    main()
