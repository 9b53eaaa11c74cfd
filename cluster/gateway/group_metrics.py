"""The group's figures as Prometheus metrics, read from its newest heartbeat whenever somebody asks."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.stats import GroupStats
from cluster.gateway.group import Group

LABELS = ["model_name"]
_Number = Callable[[GroupStats], float]


def _kv_cache_usage(stats: GroupStats) -> float:
    return stats.num_used_blocks / max(stats.num_kv_blocks, 1)


_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("vllm:num_requests_running", "Requests that have a state slot.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Requests that wait for one.", lambda s: s.waiting),
    ("vllm:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.", _kv_cache_usage),
    ("vllm:gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", _kv_cache_usage),
)
_COUNTERS: tuple[tuple[str, str, _Number], ...] = (
    ("vllm:num_preemptions", "Requests pushed out for want of KV blocks.", lambda s: s.num_preemptions),
    ("vllm:prompt_tokens", "Prompt tokens of accepted requests.", lambda s: s.num_prompt_tokens),
    ("vllm:generation_tokens", "Tokens of completions.", lambda s: s.num_generated_tokens),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.num_cache_queries),
    ("vllm:prefix_cache_hits", "Tokens found there.", lambda s: s.num_cache_hits),
    ("vllm:spec_decode_num_drafts", "Verifies with drafts.", lambda s: s.proposed[0] if s.proposed else 0),
    ("vllm:spec_decode_num_draft_tokens", "Drafts proposed.", lambda s: sum(s.proposed)),
    ("vllm:spec_decode_num_accepted_tokens", "Drafts accepted.", lambda s: sum(s.accepted)),
    ("latentray:verifies", "Verifies, with and without drafts.", lambda s: s.num_verifies),
    ("latentray:steps", "Steps sent to the shards.", lambda s: s.num_steps),
    ("latentray:rows", "Rows of all steps.", lambda s: s.num_rows),
    ("latentray:schedule_seconds", "Time spent choosing steps.", lambda s: s.schedule_s),
    ("latentray:step_seconds", "Time from the choice of steps to their reports.", lambda s: s.step_s),
    ("latentray:process_seconds", "Time spent on reports.", lambda s: s.process_s),
    ("latentray:requests_aborted", "Requests that were ended before their end.", lambda s: s.num_aborted),
)
_PHASES: tuple[tuple[str, str, _Number], ...] = (
    ("vllm:request_queue_time_seconds", "Until admitted.", lambda s: s.phases.queue_s),
    ("vllm:request_prefill_time_seconds", "From there to the first token.", lambda s: s.phases.prefill_s),
    ("vllm:request_decode_time_seconds", "From there to the end.", lambda s: s.phases.decode_s),
)
"""Of finished requests. Heartbeats carry sums and their number alone: these histograms have no buckets."""


class GroupCollector(Collector):
    """Nothing but its health is reported before the first heartbeat."""

    def __init__(self, group: Group, model_name: str) -> None:
        self._group = group
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("latentray:healthy", "1: a token can be produced now.", float(self._group.healthy))
        stats = self._group.stats
        if stats is None:
            return
        for name, documentation, number in _GAUGES:
            yield self._gauge(name, documentation, number(stats))
        for name, documentation, number in _COUNTERS:
            counter = CounterMetricFamily(name, documentation, labels=LABELS)
            counter.add_metric([self._model_name], number(stats))
            yield counter
        for name, documentation, number in _PHASES:
            histogram = HistogramMetricFamily(name, documentation, labels=LABELS)
            buckets = [("+Inf", float(stats.phases.num_finished))]
            histogram.add_metric([self._model_name], buckets=buckets, sum_value=number(stats))
            yield histogram
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position from 0.",
            labels=[*LABELS, "position"],
        )
        for position, num_accepted in enumerate(stats.accepted):
            accepted.add_metric([self._model_name, str(position)], num_accepted)
        yield accepted
        drafting = GaugeMetricFamily(
            "latentray:requests_by_drafts",
            "Requests of the newest step, by how many drafts they proposed.",
            labels=[*LABELS, "drafts"],
        )
        for k, num_requests in enumerate(stats.last_k):
            drafting.add_metric([self._model_name, str(k)], num_requests)
        yield drafting

    def _gauge(self, name: str, documentation: str, value: float) -> GaugeMetricFamily:
        gauge = GaugeMetricFamily(name, documentation, labels=LABELS)
        gauge.add_metric([self._model_name], value)
        return gauge
