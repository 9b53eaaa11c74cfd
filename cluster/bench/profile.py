"""A step by operation: share, calls, time, bytes, and how much of what the machine can do each reaches."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actors.stats import GroupStats
from cluster.bench.breakdown import PHASES, self_times, step_breakdown
from kernels_integration.profiled import PREFIX
from kernels_integration.spans import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """What one shard's threads reach at best, measured in this process."""

    dtype: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRow:
    """One operation, or what lies around them; all of one step."""

    name: str
    seconds: float
    calls: float = 0.0
    num_bytes: float = 0.0
    num_flops: float = 0.0

    def of_limit(self, limits: MachineLimits) -> float | None:
        """The time that bytes or flops would take at best over the time taken; None without work.

        Above 1 where data lies in a cache faster than memory.
        """
        least_s = max(self.num_bytes / limits.bytes_per_s, self.num_flops / limits.flops_per_s)
        return least_s / self.seconds if least_s and self.seconds else None


def profile_rows(spans: Sequence[Span], before: GroupStats, after: GroupStats) -> list[ProfileRow]:
    """Of the steps between two snapshots of a profiled group, the longest first; they add up to a step."""
    num_steps = max(1, after.num_steps - before.num_steps)
    calls: dict[str, int] = defaultdict(int)
    num_bytes: dict[str, int] = defaultdict(int)
    num_flops: dict[str, int] = defaultdict(int)
    for span in spans:
        if span.name.startswith(PREFIX):
            calls[span.name] += 1
            num_bytes[span.name] += span.num_bytes
            num_flops[span.name] += span.num_flops
    around = set(self_times(spans)) - set(calls) - set(PHASES)
    return [
        ProfileRow(
            name=f"around {name}" if name in around else name.removeprefix(PREFIX),
            seconds=seconds,
            calls=calls[name] / num_steps,
            num_bytes=num_bytes[name] / num_steps,
            num_flops=num_flops[name] / num_steps,
        )
        for name, seconds in step_breakdown(spans, before, after)
    ]


def machine_limits(dtype: str, num_threads: int) -> MachineLimits:
    """Reading memory, and a large product in dtype, with so many threads; the best of a few tries."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        far = torch.ones(1 << 26)  # 256 MiB: beyond what most caches hold
        square = torch.ones(1024, 1024, dtype=getattr(torch, dtype))
        read_s = min(_seconds(lambda: far.sum()) for _ in range(5))
        product_s = min(_seconds(lambda: square @ square) for _ in range(5))
    finally:
        torch.set_num_threads(threads)
    return MachineLimits(dtype=dtype, bytes_per_s=far.nbytes / read_s, flops_per_s=2 * 1024**3 / product_s)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s
