"""The groups' figures as Prometheus metrics, read from their newest heartbeats whenever somebody asks."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.stats import GroupStats
from cluster.answering.group import Groups

LABELS = ["model_name"]
_GROUP_LABELS = ["model_name", "engine"]
_Number = Callable[[GroupStats], float]


def _kv_cache_usage(stats: GroupStats) -> float:
    return stats.num_used_blocks / max(stats.num_kv_blocks, 1)


_GAUGES: tuple[tuple[str, str, _Number], ...] = (
    ("vllm:num_requests_running", "Requests that have a state slot.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Requests that wait for one.", lambda s: s.waiting),
    ("vllm:kv_cache_usage_perc", "Part of the KV blocks in use, 0 to 1.", _kv_cache_usage),
    ("vllm:gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", _kv_cache_usage),
    ("latentray:step_age_seconds", "How long the oldest step in flight runs.", lambda s: s.step_age_s),
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
    (
        "latentray:dropped_messages",
        "Messages between processes that were dropped, and connections without the group's keys.",
        lambda s: s.num_dropped_messages,
    ),
    ("latentray:restarts", "Times that lost shards were started again.", lambda s: s.num_restarts),
    ("latentray:requests_aborted", "Requests that were ended before their end.", lambda s: s.num_aborted),
)


class GroupCollector(Collector):
    """Nothing but a group's health is reported before its first heartbeat.

    Label engine: the group's place among the server's, as in vLLM.
    """

    def __init__(self, groups: Groups, model_name: str) -> None:
        self._groups = groups
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        healthy = GaugeMetricFamily(
            "latentray:healthy", "1: a token can be produced now.", labels=_GROUP_LABELS
        )
        known = []
        for number, group in enumerate(self._groups):
            labels = [self._model_name, str(number)]
            healthy.add_metric(labels, float(group.healthy))
            if group.stats is not None:
                known.append((labels, group.stats))
        yield healthy
        for name, documentation, number_of in _GAUGES:
            gauge = GaugeMetricFamily(name, documentation, labels=_GROUP_LABELS)
            for labels, stats in known:
                gauge.add_metric(labels, number_of(stats))
            yield gauge
        for name, documentation, number_of in _COUNTERS:
            counter = CounterMetricFamily(name, documentation, labels=_GROUP_LABELS)
            for labels, stats in known:
                counter.add_metric(labels, number_of(stats))
            yield counter
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position from 0.",
            labels=[*_GROUP_LABELS, "position"],
        )
        drafting = GaugeMetricFamily(
            "latentray:requests_by_drafts",
            "Requests of the newest step, by how many drafts they proposed.",
            labels=[*_GROUP_LABELS, "drafts"],
        )
        for labels, stats in known:
            for position, num_accepted in enumerate(stats.accepted):
                accepted.add_metric([*labels, str(position)], num_accepted)
            for k, num_requests in enumerate(stats.last_k):
                drafting.add_metric([*labels, str(k)], num_requests)
        yield accepted
        yield drafting
