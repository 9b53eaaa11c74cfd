"""Deferred against sync scheduling: tokens per second, and how much of the coordinator's time is hidden.

    python -m benchmarks.deferred [--executor inline ray] [--requests 1 8 32] [--drafts 0 3] [--repeats 8]

Modes take turns, and the median of the ratios of neighbours counts: other work on the machine slows both.
"Hidden" is the part of the coordinator's time (choose, commit) during which the shards had a step to run.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.requests import Request
from benchmarks import harness
from cluster.answering.answering import Answering
from cluster.answering.group_client import GroupClient
from cluster.launch.group import GroupHandle, launch_group

PROMPT_LEN = 32
NEW_TOKENS = 64
MODES = ("sync", "deferred")
Interval = tuple[float, float]
Seconds = dict[str, list[float]]
"""Per mode."""


def config_for(num_drafts: int, num_requests: int, scheduling: str, tp: int) -> GroupConfig:
    return harness.config(
        num_speculative_tokens=num_drafts,
        max_num_seqs=num_requests,
        max_model_len=PROMPT_LEN + NEW_TOKENS,
        scheduling=scheduling,
        tensor_parallel_size=tp,
        kv_cache_memory_bytes="64M",
    )


def requests_for(num_requests: int, tag: str) -> list[Request]:
    """Different prompts, so that nothing is found in the prefix cache."""
    return [
        harness.request(
            f"{tag}-{i}",
            [(hash((tag, i, j)) % 4000) + 2 for j in range(PROMPT_LEN)],
            num_tokens=NEW_TOKENS,
            seed=i,
        )
        for i in range(num_requests)
    ]


class Timeline:
    """When the coordinator worked, and when the shards had a step to run."""

    def __init__(self, group: InlineGroup) -> None:
        self.coordinator: list[Interval] = []
        self.shards: list[Interval] = []
        self._sent: list[float] = []
        self._last_report = 0.0
        coordinator, shards = group._coordinator, group._shards
        for name in ("schedule", "process", "take_updates"):
            setattr(coordinator, name, self._timed(getattr(coordinator, name)))
        self._send, self._next_report = shards.send, shards.next_report
        shards.send = self._note_send  # type: ignore[method-assign]
        shards.next_report = self._note_report  # type: ignore[method-assign]

    def hidden(self) -> float:
        """Share of the coordinator's time that lies within a step of the shards."""
        total = sum(end - begin for begin, end in self.coordinator)
        covered = sum(
            max(0.0, min(end, step_end) - max(begin, step_begin))
            for begin, end in self.coordinator
            for step_begin, step_end in self.shards
        )
        return covered / total

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = call(*args)
            self.coordinator.append((begin, time.perf_counter()))
            return result

        return timed

    def _note_send(self, step: Any) -> None:
        self._sent.append(time.perf_counter())
        self._send(step)

    def _note_report(self) -> Any:
        output = self._next_report()
        now = time.perf_counter()
        self.shards.append((max(self._sent.pop(0), self._last_report), now))
        self._last_report = now
        return output


def run_inline(group: InlineGroup, requests: list[Request]) -> float:
    """Seconds for all requests together."""
    for request in requests:
        group.submit(request)
    begin = time.perf_counter()
    while group.has_work:
        group.step()
    return time.perf_counter() - begin


async def run_served(groups: dict[str, GroupHandle], num_requests: int, repeats: int) -> Seconds:
    """The modes take turns."""

    async def drain(client: GroupClient, request: Request) -> None:
        async for _ in Answering([client]).run(request):
            pass

    seconds: Seconds = {mode: [] for mode in groups}
    for repeat in range(repeats + 1):
        for mode, group in groups.items():
            async with GroupClient(group.request_address, keys=group.request_keys) as client:
                while not client.healthy:
                    await asyncio.sleep(0.05)
                batch = requests_for(num_requests, f"{mode}{repeat}")
                begin = time.perf_counter()
                await asyncio.gather(*(drain(client, request) for request in batch))
                seconds[mode].append(time.perf_counter() - begin)
    return seconds


def inline(num_requests: int, num_drafts: int, repeats: int, tp: int) -> tuple[Seconds, str]:
    """Seconds of each run of each mode, and how much of the coordinator's time is hidden."""
    groups = {mode: InlineGroup(config_for(num_drafts, num_requests, mode, tp)) for mode in MODES}
    seconds: Seconds = {mode: [] for mode in MODES}
    for repeat in range(repeats + 1):
        for mode, group in groups.items():
            seconds[mode].append(run_inline(group, requests_for(num_requests, f"{mode}{repeat}")))
    hidden = []
    for mode, group in groups.items():
        timeline = Timeline(group)
        run_inline(group, requests_for(num_requests, f"{mode}-timeline"))
        group.close()
        hidden.append(f"{timeline.hidden():.0%}")
    return seconds, f"; hidden {', '.join(hidden)}"


def served(num_requests: int, num_drafts: int, repeats: int, tp: int) -> tuple[Seconds, str]:
    """The same through Ray actors and ZeroMQ."""
    with ExitStack() as stack:
        groups = {}
        for mode in MODES:
            config = config_for(num_drafts, num_requests, mode, tp)
            groups[mode] = stack.enter_context(launch_group(config, address="local"))
        return asyncio.run(run_served(groups, num_requests, repeats)), ""


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--executor", nargs="+", choices=["inline", "ray"], default=["inline"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--tp", type=int, default=1)
    args = parser.parse_args()
    print(harness.machine())
    for executor in args.executor:
        measure = inline if executor == "inline" else served
        for num_drafts in args.drafts:
            for num_requests in args.requests:
                seconds, note = measure(num_requests, num_drafts, args.repeats, args.tp)
                sync, deferred = seconds["sync"][1:], seconds["deferred"][1:]  # the first runs warm up
                ratio = statistics.median(s / d for s, d in zip(sync, deferred, strict=True))
                num_tokens = num_requests * NEW_TOKENS
                print(
                    f"{executor}, tp {args.tp}, {num_drafts} drafts, {num_requests:3d} requests: "
                    f"sync {num_tokens / statistics.median(sync):7.1f} tokens/s, "
                    f"deferred {num_tokens / statistics.median(deferred):7.1f} tokens/s; "
                    f"deferred is {ratio:.3f} times as fast{note}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
