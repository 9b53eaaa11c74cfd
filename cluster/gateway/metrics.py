"""Prometheus metrics of one gateway: vLLM's names where the meaning is vLLM's, latentray's own elsewhere.

What a gateway's own clients see is counted here, by `cluster.gateway.request_record`; the groups' figures
are in `cluster.gateway.group_metrics`.
"""

import itertools
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from cluster.answering.group import Groups
from cluster.errors import OUTCOMES
from cluster.gateway.group_metrics import LABELS, GroupCollector
from cluster.gateway.recent_failures import RecentFailures

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
CLIENT_GONE = "client_gone"
"""Among the codes of failures: the call was cancelled by its client, or its connection was lost."""
ABORTS = frozenset({"aborted", "deadline_exceeded", CLIENT_GONE})
"""The codes that vLLM calls "abort"; the others are "error"."""


class GatewayMetrics:
    """Latencies, lengths and ends of requests as this gateway's clients see them.

    "Each completion": a request with n completions counts n times, as with vLLM.
    """

    def __init__(self, groups: Groups, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(GroupCollector(groups, model_name))
        self._model_name = model_name
        self.recent_failures = RecentFailures()
        self.time_to_first_token = self._latency(
            "vllm:time_to_first_token_seconds", "Each completion: from the arrival to the first token."
        )
        self.latency = self._latency(
            "vllm:e2e_request_latency_seconds", "Each completion: from the arrival to the last token."
        )
        self.between_tokens = (
            self._latency("vllm:inter_token_latency_seconds", "Between a completion's updates with tokens."),
            self._latency("vllm:time_per_output_token_seconds", "Older name of inter_token_latency_seconds."),
        )
        self.time_per_token = self._latency(
            "vllm:request_time_per_output_token_seconds",
            "Each completion: mean time between tokens after the first.",
        )
        self.queue_time = self._latency(
            "vllm:request_queue_time_seconds", "Each finished completion: until it was admitted."
        )
        self.prefill_time = self._latency(
            "vllm:request_prefill_time_seconds", "Each finished completion: from there to its first token."
        )
        self.decode_time = self._latency(
            "vllm:request_decode_time_seconds", "Each finished completion: from there to its end."
        )
        lengths = _one_two_five(max_model_len)
        self.prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Each completion: tokens of its prompt.", lengths
        )
        self.generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Each completion: its tokens.", lengths
        )
        self.max_generation_tokens = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest completion.", lengths
        )
        self._finished = Counter(
            "vllm:request_success",
            "Completions of accepted requests, by how they ended.",
            [*LABELS, "finished_reason"],
            registry=self.registry,
        )
        self._failed = Counter(
            "latentray:requests_failed",
            "Requests that ended without their last token, by the code of the error.",
            [*LABELS, "code"],
            registry=self.registry,
        )
        # A rate needs the zero before the first one.
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(model_name, reason)
        for code in (*OUTCOMES, CLIENT_GONE):
            self._failed.labels(model_name, code)

    def count_finished(self, reason: str, number: int = 1) -> None:
        """Completions. reason: stop, length, abort or error."""
        self._finished.labels(self._model_name, reason).inc(number)

    def count_failed(self, code: str) -> None:
        """A request."""
        self._failed.labels(self._model_name, code).inc()

    def _latency(self, name: str, documentation: str) -> Histogram:
        return self._histogram(name, documentation, _LATENCIES_S)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, documentation, LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(self._model_name)


def _one_two_five(limit: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to limit: vLLM's buckets of lengths."""
    steps = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    return [float(step) for step in itertools.takewhile(lambda step: step <= limit, steps)]
