"""Prometheus metrics of one gateway: vLLM's names where the meaning is vLLM's, latentray's own elsewhere."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from actors.requests import RequestUpdate
from actors.stats import GroupStats
from cluster.gateway.group import Group
from kernels_integration.errors import ConfigError

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_LABELS = ["model_name"]

_GAUGES: tuple[tuple[str, str, Callable[[GroupStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests that have a state slot.", lambda s: s.running),
    ("vllm:num_requests_waiting", "Requests that wait for one.", lambda s: s.waiting),
    (
        "vllm:kv_cache_usage_perc",
        "Part of the KV blocks in use, 0 to 1.",
        lambda s: s.num_used_blocks / max(s.num_kv_blocks, 1),
    ),
)
_COUNTERS: tuple[tuple[str, str, Callable[[GroupStats], float]], ...] = (
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
    ("latentray:request_queue_seconds", "Of finished requests: until admitted.", lambda s: s.phases.queue_s),
    ("latentray:request_prefill_seconds", "Then until the first token.", lambda s: s.phases.prefill_s),
    ("latentray:request_decode_seconds", "Then until the end.", lambda s: s.phases.decode_s),
    ("latentray:requests_finished", "Requests in these sums.", lambda s: s.phases.num_finished),
)


class GatewayMetrics:
    """Latencies as this gateway's clients see them, and the group's figures as of its last heartbeat."""

    def __init__(self, group: Group, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_GroupCollector(group, model_name))
        self._time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", model_name
        )
        self._latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From a request's arrival to its last token.", model_name
        )
        self._time_per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Of each request: mean time between tokens after the first.",
            model_name,
        )
        self._finished = Counter(
            "vllm:request_success",
            "Requests that came to their end.",
            [*_LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._model_name = model_name

    def request(self) -> "RequestTimer":
        return RequestTimer(self)

    def serve(self, host: str, port: int) -> int:
        """Answer HTTP in a thread of its own; the port. Errors: ConfigError when the port cannot be had."""
        try:
            server, _ = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} for metrics: {error.strerror}; pass another --metrics-port "
                "(0 takes a free one)"
            ) from error
        return int(server.server_port)

    def _histogram(self, name: str, documentation: str, model_name: str) -> Histogram:
        histogram = Histogram(name, documentation, _LABELS, buckets=_LATENCIES_S, registry=self.registry)
        return histogram.labels(model_name)


class RequestTimer:
    """Of one choice of one request, from now on."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._arrived_at_s = time.monotonic()
        self._first_at_s: float | None = None

    def took(self, update: RequestUpdate) -> None:
        """The group sent this."""
        metrics, now = self._metrics, time.monotonic()
        if self._first_at_s is None and update.token_ids:
            self._first_at_s = now
            metrics._time_to_first_token.observe(now - self._arrived_at_s)
        if update.finish_reason is None:
            return
        metrics._latency.observe(now - self._arrived_at_s)
        metrics._finished.labels(metrics._model_name, update.finish_reason).inc()
        if self._first_at_s is not None and update.num_completion_tokens > 1:
            metrics._time_per_token.observe((now - self._first_at_s) / (update.num_completion_tokens - 1))


class _GroupCollector(Collector):
    """Reads GroupStats when asked; nothing is reported before the first heartbeat."""

    def __init__(self, group: Group, model_name: str) -> None:
        self._group = group
        self._model_name = model_name

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        healthy = GaugeMetricFamily("latentray:healthy", "1: a token can be produced now.", labels=_LABELS)
        healthy.add_metric([self._model_name], float(self._group.healthy))
        yield healthy
        stats = self._group.stats
        if stats is None:
            return
        for name, documentation, value in _GAUGES:
            gauge = GaugeMetricFamily(name, documentation, labels=_LABELS)
            gauge.add_metric([self._model_name], value(stats))
            yield gauge
        for name, documentation, value in _COUNTERS:
            counter = CounterMetricFamily(name, documentation, labels=_LABELS)
            counter.add_metric([self._model_name], value(stats))
            yield counter
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by position from 0.",
            labels=[*_LABELS, "position"],
        )
        for position, number in enumerate(stats.accepted):
            accepted.add_metric([self._model_name, str(position)], number)
        yield accepted
        drafting = GaugeMetricFamily(
            "latentray:requests_by_drafts",
            "Requests of the newest step, by how many drafts they proposed.",
            labels=[*_LABELS, "drafts"],
        )
        for k, number in enumerate(stats.last_k):
            drafting.add_metric([self._model_name, str(k)], number)
        yield drafting
