"""Dashboards and alerts ask for metrics that a gateway tells."""

import json
import re
from itertools import combinations
from typing import Any

import pytest

from helm.dashboard import FILE, dashboard, metrics
from tests.support.chart import Renderer, one

TOLD = {sample.name for metric in metrics() for sample in metric.samples}
"""Names of samples, as a scrape has them."""


def _asked(expression: str) -> set[str]:
    return set(re.findall(r"(?:vllm|latentray):\w+", expression))


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def test_the_dashboard_of_the_chart_is_the_registrys() -> None:
    """Else: python -m helm.dashboard"""
    assert json.loads(FILE.read_text()) == dashboard()


@pytest.mark.parametrize("panel", _panels(), ids=lambda panel: panel["title"])
def test_every_panel_asks_for_metrics_that_exist(panel: dict[str, Any]) -> None:
    asked = {name for target in panel["targets"] for name in _asked(target["expr"])}
    assert asked
    assert asked <= TOLD


@pytest.mark.parametrize("panel", _panels(), ids=lambda panel: panel["title"])
def test_labels_that_a_panel_groups_by_exist(panel: dict[str, Any]) -> None:
    labels = {sample.name: set(sample.labels) for metric in metrics() for sample in metric.samples}
    for target in panel["targets"]:
        [name] = _asked(target["expr"])
        for group in re.findall(r"by \(([^)]*)\)", target["expr"]):
            assert set(group.split(", ")) <= labels[name]


def test_every_metric_has_a_panel() -> None:
    """But for older names of others."""
    described = {panel["description"].partition(": ")[0] for panel in _panels()}
    older = {"vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds"}
    assert described == {metric.name for metric in metrics()} - older


def test_panels_do_not_overlap() -> None:
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    for a, b in combinations(places, 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_alerts_ask_for_metrics_that_exist(chart: Renderer) -> None:
    documents = chart.documents({"monitoring": {"rules": True}})
    [group] = one(documents, "PrometheusRule")["spec"]["groups"]
    service = one(documents, "Service", "demo-latentray-metrics")
    assert len(group["rules"]) >= 9
    for rule in group["rules"]:
        assert _asked(rule["expr"])
        assert _asked(rule["expr"]) <= TOLD, rule["alert"]
        # what a ServiceMonitor names the job of the pods that it scrapes
        assert f'job="{service["metadata"]["name"]}",namespace="llm"' in rule["expr"]
        assert rule["expr"].count("(") == rule["expr"].count(")")
        assert rule["expr"].count("{") == rule["expr"].count("}")


def test_thresholds_are_the_values(chart: Renderer) -> None:
    values = {
        "monitoring": {"rules": True, "alerts": {"waitingRequests": 77}},
        "config": {"step-timeout": 25},
    }
    [group] = one(chart.documents(values), "PrometheusRule")["spec"]["groups"]
    expressions = {rule["alert"]: rule["expr"] for rule in group["rules"]}
    assert expressions["LatentrayQueueGrows"].endswith("> 77")
    assert expressions["LatentrayStepHangs"].endswith("> 25")
