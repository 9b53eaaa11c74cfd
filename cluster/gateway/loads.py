"""The load of a group as GetLoads reports it, and its rate over time."""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from actors.config import GroupConfig
from cluster import __version__
from cluster.gateway.group import Group
from cluster.gateway.live_requests import LiveRequests

WINDOW_S = 5.0
"""Tokens per second are those of the last window."""
_SAMPLE_INTERVAL_S = 0.5


class Loads:
    """Reads the group's figures; the rate needs `sample_group` to run beside."""

    def __init__(
        self,
        group: Group,
        live: LiveRequests,
        config: GroupConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._live = live
        self._config = config
        self._clock = clock
        self._samples: list[tuple[float, int]] = []
        """(time, tokens generated until then) of the last window, oldest first."""

    async def sample_group(self) -> None:
        """Note the number of generated tokens every now and then, for as long as the server runs."""
        while True:
            self.sample()
            await asyncio.sleep(_SAMPLE_INTERVAL_S)

    def sample(self) -> None:
        stats = self._group.stats
        if stats is None:
            return
        now = self._clock()
        self._samples.append((now, stats.num_generated_tokens))
        self._samples = [s for s in self._samples if s[0] >= now - WINDOW_S]

    def tokens_per_second(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (start_s, first), (end_s, last) = self._samples[0], self._samples[-1]
        # A restarted coordinator counts from zero.
        return max(last - first, 0) / (end_s - start_s)

    def response(self) -> pb.GetLoadsResponse:
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=__version__,
            dp_rank_count=1,
            loads=[self._load()],
        )

    def _load(self) -> pb.SchedulerLoad:
        load = pb.SchedulerLoad(dp_rank=0, max_running_requests=self._config.max_num_seqs)
        load.max_total_num_tokens = self._config.num_kv_blocks * self._config.tokens_per_block
        stats = self._group.stats
        if stats is None:
            return load
        load.num_running_reqs = stats.running
        load.num_waiting_reqs = stats.waiting
        load.num_total_reqs = stats.running + stats.waiting
        load.num_used_tokens = stats.num_used_blocks * self._config.tokens_per_block
        load.token_usage = stats.num_used_blocks / self._config.num_kv_blocks
        load.cache_hit_rate = stats.cache_hit_rate
        load.utilization = stats.running / self._config.max_num_seqs
        load.gen_throughput = self.tokens_per_second()
        load.num_waiting_uncached_tokens = self._live.num_waiting_prompt_tokens(stats.waiting)
        return load
