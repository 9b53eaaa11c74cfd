"""The values: declared, closed, documented, and each of them does something."""

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config.serve_args import ServeArgs
from cluster.config.setting import declared
from helm.values_schema import values_schema
from helm.values_table import PAGE, values_table
from tests.support.chart import CASES, CHART, ChartError, Renderer, values_of

SCHEMA = values_schema()
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
Path = tuple[str, ...]


def test_the_schema_is_the_declared_one() -> None:
    """Else: python -m helm.values_schema > helm/latentray/values.schema.json"""
    assert json.loads((CHART / "values.schema.json").read_text()) == json.loads(json.dumps(SCHEMA))


def test_the_table_is_that_of_the_schema() -> None:
    """Else: python -m helm.values_table"""
    assert values_table() in PAGE.read_text()


def _schemas(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(schema, dict):
        yield path, schema
        for key, value in schema.items():
            yield from _schemas(value, f"{path}/{key}")
    elif isinstance(schema, list):
        for value in schema:
            yield from _schemas(value, path)


def test_every_object_is_closed() -> None:
    """Only named properties, or values of one kind under legal names."""
    objects = {path: s for path, s in _schemas(SCHEMA) if s.get("type") == "object"}
    assert len(objects) > 30
    for path, schema in objects.items():
        assert "additionalProperties" in schema, path
        assert schema["additionalProperties"] is not True, path


def test_every_setting_of_a_file_can_be_given() -> None:
    keys = {setting.key for setting in declared(ServeArgs).values()} - {"address"}
    assert set(SCHEMA["properties"]["config"]["properties"]) == keys


def _leaves(values: Any, schema: dict[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Values that are not closed objects, with their defaults."""
    if "properties" in schema and path != ("config",):
        for name, inner in schema["properties"].items():
            assert name in values, f"{'.'.join((*path, name))} is not in values.yaml"
            inner = _resolved(inner)
            if name in ("affinity", "resources"):
                yield (*path, name), values[name]
            else:
                yield from _leaves(values[name], inner, (*path, name))
    else:
        yield path, values


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").rpartition("/")[2]
    return SCHEMA["definitions"][name] if name else schema


LEAVES = dict(_leaves(DEFAULTS, SCHEMA))

OTHERS: dict[str, list[Any]] = {
    "pullSecrets": [["x7"]],
    "tolerations": [[{"key": "x", "operator": "Exists"}]],
    "topologySpreadConstraints": [
        [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "ScheduleAnyway"}]
    ],
    "affinity": [
        {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "z"}]}}
    ],
    "resources": [{"requests": {"cpu": "7"}}],
    "workers": [[{"name": "x", "replicas": 1, "rayCpus": 1}]],
    "parentRefs": [[{"name": "x7"}]],
    "viewers": [[{"kind": "User", "name": "x7"}]],
    "config": [DEFAULTS["config"] | {"max-num-seqs": 7}],
    "directory": ["x7"],
    "paths": [["/x7"]],
    "accelerator": ["nvidia", "none"],
    "pullPolicy": ["Never"],
    "type": ["NodePort"],
    "upgradeStrategy": ["None"],
    "clients": [[]],
    "monitoring": [[]],
    "operator": [[]],
    "egress": [[{"podSelector": {}}]],
}
TEXTS = ["x7", "/x7", "7Gi", "7s", "7.7.7", "o/x7", "/data/x7", "/models/x7"]


def _others(path: Path, value: Any) -> list[Any]:
    if path[-1] in OTHERS:
        return OTHERS[path[-1]]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value - 1, value + 60]
    if isinstance(value, dict):
        return [value | {"x7": "y7"}]
    if isinstance(value, list):
        return [[*value, "x7"]]
    return TEXTS


def _present(values: dict[str, Any], path: Path) -> Any:
    """The value of a file, or the default."""
    inner: Any = values
    for name in path:
        if name not in inner:
            return LEAVES[path]
        inner = inner[name]
    return inner


def _set(values: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    """A copy of values with another value there."""
    changed = copy.deepcopy(values)
    inner = changed
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    inner[path[-1]] = value
    return changed


BASES = [
    *(dict(values_of(case)) for case in reversed(CASES)),
    *({kind: {"enabled": True, "parentRefs": [{"name": "g"}]}} for kind in ("httpRoute", "grpcRoute")),
    {"ingress": {"enabled": True, "host": "h"}},
]
"""In which a value is changed."""
TOGETHER: dict[str, dict[str, Any]] = {
    "model.mountPath": {"config": {"model": "/x7/glm"}},
    "model.download.directory": {"config": {"model": "/models/x7"}},
    "batch.mountPath": {"batch": {"input": "/x7/in", "output": "/x7/out"}},
}
"""What must change with a value, by its rules."""


def _merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    result = copy.deepcopy(values)
    for name, change in changes.items():
        inner = result.get(name, {})
        result[name] = (
            _merged(inner, change) if isinstance(change, dict) and isinstance(inner, dict) else change
        )
    return result


@cache
def _bases(chart: Renderer) -> list[tuple[dict[str, Any], dict[str, str]]]:
    """And what they render."""
    return [(base, chart.text(base)) for base in BASES]


@pytest.mark.parametrize("path", LEAVES, ids=".".join)
def test_every_value_does_something(chart: Renderer, path: Path) -> None:
    """In one of the bases another value gives other objects."""
    name = ".".join(path)
    for base, before in _bases(chart):
        for other in _others(path, _present(base, path)):
            try:
                after = chart.text(_merged(_set(base, path, other), TOGETHER.get(name, {})))
            except ChartError:
                continue
            if after != before and _differs_by_more_than_the_rest(chart, base, name, after):
                return
    pytest.fail(f"{name} changes nothing")


def _differs_by_more_than_the_rest(chart: Renderer, base: dict[str, Any], name: str, after: Any) -> bool:
    if name not in TOGETHER:
        return True
    try:
        return chart.text(_merged(base, TOGETHER[name])) != after
    except ChartError:
        return True


def test_every_value_is_explained() -> None:
    for path in LEAVES:
        schema = SCHEMA
        for name in path:
            schema = _resolved(schema["properties"][name])
        assert re.search(r"\w{2}.*[.;)]", schema["description"]), path


OPTIONAL: dict[str, Any] = {
    "image": {"tag": "1", "pullSecrets": ["registry"]},
    "env": {"OMP_NUM_THREADS": "4"},
    "ray": {"authSecret": "token", "upgradeStrategy": "None"},
    "head": {"priorityClassName": "high", "nodeSelector": {"a": "b"}, "maxDisrupted": 1},
    "server": {
        "tolerations": OTHERS["tolerations"][0],
        "topologySpreadConstraints": OTHERS["topologySpreadConstraints"][0],
        "affinity": OTHERS["affinity"][0],
        "labels": {"a": "b"},
        "annotations": {"a": "b"},
        "drainSeconds": 0,
        "maxDisrupted": 0,
    },
    "workers": [{"name": "more", "replicas": 2, "rayCpus": 1, "resources": {"limits": {"cpu": "1"}}}],
    "batch": {"enabled": True, "existingClaim": "rows", "input": "/data/i", "output": "/data/o"},
    "service": {"type": "NodePort", "annotations": {"a": "b"}},
    "ingress": {"enabled": True, "host": "h.example", "tlsSecret": "t", "className": "c"},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}]},
    "grpcRoute": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["h"]},
    "serviceAccount": {"create": False},
    "rbac": {"viewers": OTHERS["viewers"][0]},
    "networkPolicy": {"restrictEgress": True, "clients": [], "operator": []},
    "monitoring": {"serviceMonitor": True, "podMonitor": True, "rules": True, "dashboards": True},
    "model": {"existingClaim": "m"},
    "config": {"model": "/models/m"},
}
TIED = ("model", "config")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.sets(st.sampled_from(sorted(OPTIONAL))), batch_at=st.sampled_from(["", "0 2 * * *"]))
def test_any_optional_values_give_legal_objects(chart: Renderer, chosen: set[str], batch_at: str) -> None:
    from tests.helm import test_chart_objects as objects

    if chosen & set(TIED):
        chosen |= set(TIED)
    values = {name: copy.deepcopy(OPTIONAL[name]) for name in chosen}
    if "batch" in values:
        values["batch"]["schedule"] = batch_at
    documents = chart.documents(values)
    objects.test_objects_are_legal(documents, objects.NEWEST)
    objects.test_kuberays_objects_are_legal(documents)
    objects.test_selectors_select(documents)
    objects.test_monitors_find_their_ports(documents)
    objects.test_every_mount_has_its_volume_and_every_volume_its_mount(documents)
    objects.test_pods_are_restricted(documents)
