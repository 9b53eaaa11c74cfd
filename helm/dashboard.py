"""The Grafana dashboard, out of the metrics' registry: `python -m helm.dashboard`.

Writes helm/latentray/dashboards/latentray.json. A metric of the registry that no row names gets a panel in
the last row, so that none is forgotten.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from prometheus_client import Metric

from actors.stats import GroupStats
from cluster.answering.group import Group, Groups
from cluster.gateway.metrics import GatewayMetrics

FILE = Path(__file__).parent / "latentray" / "dashboards" / "latentray.json"
_ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Is it serving?",
        (
            "latentray:healthy",
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "latentray:requests_failed",
            "vllm:request_success",
        ),
    ),
    (
        "What clients see",
        (
            "vllm:time_to_first_token_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:e2e_request_latency_seconds",
            "vllm:request_queue_time_seconds",
            "vllm:request_prefill_time_seconds",
            "vllm:request_decode_time_seconds",
        ),
    ),
    ("Tokens", ("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_prompt_tokens")),
    (
        "Drafts",
        (
            "latentray:verifies",
            "vllm:spec_decode_num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "latentray:requests_by_drafts",
        ),
    ),
    ("Steps", ("latentray:steps", "latentray:rows", "latentray:step_age_seconds", "latentray:step_seconds")),
)
_OLDER_NAMES = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"}
"""Of metrics that have a panel."""
_SELECTED = 'namespace=~"$namespace",job=~"$job"'
_WIDTH, _HEIGHT, _PER_ROW = 8, 7, 3


@dataclass(frozen=True, slots=True)
class _Query:
    expression: str
    legend: str


class _IdleGroup:
    """Of a group what metrics ask: figures of every kind, so that the registry has every metric."""

    healthy = True
    stats = GroupStats(proposed=(1, 1, 1), accepted=(1, 1, 0), last_k=(0, 0, 0, 1))


def metrics() -> list[Metric]:
    """Every metric that a gateway tells, with samples."""
    group = cast(Group, _IdleGroup())
    return list(GatewayMetrics(Groups([group]), "model", 1024).registry.collect())


def dashboard() -> dict[str, Any]:
    """Grafana's JSON."""
    return {
        "uid": "latentray",
        "title": "latentray",
        "tags": ["latentray"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_data_source(), _label("namespace"), _label("job")]},
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    left = {metric.name: metric for metric in metrics() if metric.name not in _OLDER_NAMES}
    named = [(title, [left.pop(name) for name in names]) for title, names in _ROWS]
    y = number = 0
    for title, of_row in [*named, ("Further", list(left.values()))]:
        number += 1
        yield {"id": number, "type": "row", "title": title, "collapsed": False} | _at(0, y, 24, 1)
        y += 1
        for place, metric in enumerate(of_row):
            number += 1
            column, line = place % _PER_ROW, place // _PER_ROW
            yield _panel(number, metric) | _at(column * _WIDTH, y + line * _HEIGHT, _WIDTH, _HEIGHT)
        y += -(-len(of_row) // _PER_ROW) * _HEIGHT


def _at(x: int, y: int, width: int, height: int) -> dict[str, Any]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(number: int, metric: Metric) -> dict[str, Any]:
    queries = _queries(metric)
    return {
        "id": number,
        "type": "timeseries",
        "title": metric.name.partition(":")[2].replace("_", " "),
        "description": f"{metric.name}: {metric.documentation}",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {"defaults": {"unit": _unit(metric), "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": query.expression, "legendFormat": query.legend}
            for place, query in enumerate(queries)
        ],
    }


def _queries(metric: Metric) -> list[_Query]:
    """Gauges as they are, counters by their rate, histograms by their quantiles."""
    own = [name for name in metric.samples[0].labels if name not in ("model_name", "engine", "le")]
    legend = " ".join(f"{{{{{name}}}}}" for name in ["model_name", *own])
    by = ", ".join(["model_name", *own])
    if metric.type == "gauge":
        return [_Query(f"{metric.name}{{{_SELECTED}}}", f"{legend} {{{{pod}}}}")]
    if metric.type == "counter":
        return [_Query(f"sum by ({by}) (rate({metric.name}_total{{{_SELECTED}}}[$__rate_interval]))", legend)]
    rate = f"sum by (le, {by}) (rate({metric.name}_bucket{{{_SELECTED}}}[$__rate_interval]))"
    return [_Query(f"histogram_quantile({q}, {rate})", f"{legend} p{q * 100:g}") for q in (0.5, 0.95, 0.99)]


def _unit(metric: Metric) -> str:
    if metric.name.endswith("_perc"):
        return "percentunit"
    if metric.name.endswith("_seconds"):
        return "none" if metric.type == "counter" else "s"
    return "cps" if metric.type == "counter" else "short"


def _data_source() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _label(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values(latentray:healthy, {name})",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
