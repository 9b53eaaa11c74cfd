"""What a gateway knows of its deployment, as JSON: the twin of the status page."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from actors.config import GroupConfig
from actors.stats import GroupStats
from cluster import __version__
from cluster.answering.answering import Answering
from cluster.answering.group import Group
from cluster.gateway.health import GroupHealth
from cluster.gateway.loads import Loads
from cluster.gateway.metrics import GatewayMetrics


class StatusDocument:
    """Read from the groups' newest heartbeats whenever somebody asks."""

    def __init__(
        self,
        *,
        answering: Answering,
        config: GroupConfig,
        health: GroupHealth,
        loads: Loads,
        metrics: GatewayMetrics,
        actors_by_node: Mapping[str, str],
    ) -> None:
        self._answering = answering
        self._config = config
        self._health = health
        self._loads = loads
        self._metrics = metrics
        self._actors_by_node = actors_by_node
        self._started_at_s = time.monotonic()

    def read(self) -> dict[str, Any]:
        """Keys: server, nodes, groups, failures (newest first). Times are Unix seconds, rates a second's."""
        config = self._config
        return {
            "time": time.time(),
            "server": {
                "version": __version__,
                "model": config.served_model_name,
                "serving": self._health.serving,
                "message": "" if self._health.serving else self._health.message,
                "uptime_s": round(time.monotonic() - self._started_at_s, 1),
                "live_requests": len(self._answering.live),
                "max_model_len": config.max_model_len,
                "max_num_seqs": config.max_num_seqs,
                "tensor_parallel_size": config.tensor_parallel_size,
                "decode_context_parallel_size": config.decode_context_parallel_size,
                "num_speculative_tokens": config.num_speculative_tokens,
                "dtype": config.dtype,
                "kv_cache_dtype": config.kv_cache_dtype,
                "attention_backend": config.attention_backend,
            },
            "nodes": dict(self._actors_by_node),
            "groups": [self._group(number, group) for number, group in enumerate(self._answering.groups)],
            "failures": [dataclasses.asdict(failure) for failure in self._metrics.recent_failures],
        }

    def _group(self, number: int, group: Group) -> dict[str, Any]:
        """stats: null before the first heartbeat."""
        stats, groups = group.stats, self._answering.groups
        return {
            "number": number,
            "takes_requests": groups.is_open(group),
            "healthy": group.healthy,
            "recovering": group.is_recovering,
            "message": "" if groups.is_open(group) else groups.message_of(group),
            "tokens_per_s": round(self._loads.tokens_per_second(group), 1),
            "stats": None if stats is None else _figures(stats),
        }


def _figures(stats: GroupStats) -> dict[str, Any]:
    means = {
        "acceptance": stats.acceptance,
        "tokens_per_verify": stats.tokens_per_verify,
        "cache_hit_rate": stats.cache_hit_rate,
    }
    found: dict[str, Any] = msgspec.to_builtins(stats)
    return found | means
