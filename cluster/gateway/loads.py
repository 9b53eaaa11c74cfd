"""The load of each group as GetLoads reports it, and its rate over time."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.config import GroupConfig
from cluster import __version__
from cluster.answering.group import Group, Groups
from cluster.answering.live_requests import LiveRequests

WINDOW_S = 5.0
"""Tokens per second are those of the last window."""
_SAMPLE_INTERVAL_S = 0.5


class Loads:
    """Reads the groups' figures; the rates need `sample_groups` to run beside. dp_rank: the group's place."""

    def __init__(
        self,
        groups: Groups,
        live: LiveRequests,
        config: GroupConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups = groups
        self._live = live
        self._config = config
        self._clock = clock
        self._samples: dict[Group, list[tuple[float, int]]] = {group: [] for group in groups}
        """(time, tokens generated until then) of the last window, oldest first."""

    async def sample_groups(self) -> None:
        """Note the number of generated tokens every now and then, for as long as the server runs."""
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    def sample(self) -> None:
        now = self._clock()
        for group, samples in self._samples.items():
            if group.stats is not None:
                samples.append((now, group.stats.num_generated_tokens))
                samples[:] = [s for s in samples if s[0] >= now - WINDOW_S]

    def tokens_per_second(self, group: Group) -> float:
        samples = self._samples[group]
        if len(samples) < 2:
            return 0.0
        (start_s, first), (end_s, last) = samples[0], samples[-1]
        # A restarted coordinator counts from zero.
        return max(last - first, 0) / (end_s - start_s)

    def response(self, dp_rank: int | None = None) -> pb.GetLoadsResponse:
        """Of all groups, or of one."""
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=__version__,
            dp_rank_count=len(self._groups),
            loads=[
                self._load(rank, group) for rank, group in enumerate(self._groups) if dp_rank in (None, rank)
            ],
        )

    def _load(self, rank: int, group: Group) -> pb.SchedulerLoad:
        load = pb.SchedulerLoad(dp_rank=rank, max_running_requests=self._config.max_num_seqs)
        load.max_total_num_tokens = self._config.num_kv_blocks * self._config.tokens_per_block
        stats = group.stats
        if stats is None:
            return load
        load.num_running_reqs = stats.running
        load.num_waiting_reqs = stats.waiting
        load.num_total_reqs = stats.running + stats.waiting
        load.num_used_tokens = stats.num_used_blocks * self._config.tokens_per_block
        load.token_usage = stats.num_used_blocks / self._config.num_kv_blocks
        load.cache_hit_rate = stats.cache_hit_rate
        load.utilization = stats.running / self._config.max_num_seqs
        load.gen_throughput = self.tokens_per_second(group)
        load.num_waiting_uncached_tokens = self._live.num_waiting_prompt_tokens(group, stats.waiting)
        return load
