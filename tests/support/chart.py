"""The Helm chart, rendered: by helm-python-sdk, or by the `helm` binary that HELM_BINARY names."""

import json
import os
import pickle
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import helm_python
import yaml
from helm_python.chart import Chart

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "latentray"
CASES = sorted((ROOT / "helm" / "ci").glob("*.yaml"))
Values = Mapping[str, Any]
Document = dict[str, Any]


class ChartError(Exception):
    """Helm refused the values; the message is Helm's."""


class Renderer:
    """Renders as a first install of release `demo` in namespace `llm` would."""

    def __init__(self) -> None:
        self._binary = os.environ.get("HELM_BINARY")
        self._chart = Chart.load(CHART)
        self._documents: dict[str, bytes] = {}

    def text(self, values: Values, *, name: str = "demo") -> dict[str, str]:
        """By template. Errors: ChartError."""
        if self._binary is not None:
            return self._text_of_binary(values, name)
        try:
            rendered = self._chart.render(dict(values), name=name, namespace="llm")
        except helm_python.HelmError as error:
            raise ChartError(str(error)) from error
        return {Path(path).name: text for path, text in rendered.items()}

    def documents(self, values: Values, *, name: str = "demo") -> list[Document]:
        """Every object, by kind and name. Errors: ChartError."""
        key = json.dumps([values, name], sort_keys=True)
        if key not in self._documents:
            texts = self.text(values, name=name).items()
            found = [d for path, text in texts if path.endswith(".yaml") for d in _parsed(text) if d]
            found.sort(key=lambda document: (document["kind"], document["metadata"]["name"]))
            self._documents[key] = pickle.dumps(found)
        documents: list[Document] = pickle.loads(self._documents[key])  # a test may change its own
        return documents

    def _text_of_binary(self, values: Values, name: str) -> dict[str, str]:
        assert self._binary is not None
        result = subprocess.run(
            [self._binary, "template", name, str(CHART), "--namespace", "llm", "--values", "-"],
            input=json.dumps(values),
            capture_output=True,
            text=True,
        )
        if result.returncode:
            raise ChartError(result.stderr)
        return {"all.yaml": result.stdout}


def _parsed(text: str) -> Iterator[Document]:
    yield from yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def values_of(case: Path) -> Values:
    values: Values = yaml.safe_load(case.read_text())
    return values


def one(documents: list[Document], kind: str, name: str | None = None) -> Document:
    """The one object of the kind (and name)."""
    [found] = [d for d in documents if d["kind"] == kind and name in (None, d["metadata"]["name"])]
    return found


def ray_clusters(documents: list[Document]) -> Iterator[Document]:
    """The spec of every Ray cluster: RayCluster's own, and those inside of jobs."""
    for document in documents:
        spec = document.get("spec", {})
        if document["kind"] == "RayCluster":
            yield spec
        elif document["kind"] == "RayJob":
            yield spec["rayClusterSpec"]
        elif document["kind"] == "RayCronJob":
            yield spec["jobTemplate"]["rayClusterSpec"]


def pod_templates(documents: list[Document]) -> Iterator[Document]:
    """metadata and spec of every pod that comes of the objects."""
    for cluster in ray_clusters(documents):
        yield from (group["template"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]])
    for document in documents:
        if document["kind"] == "Pod":
            yield document
        elif document["kind"] == "Job":
            yield document["spec"]["template"]
        elif document["kind"] in ("RayJob", "RayCronJob"):
            spec = document["spec"]
            yield spec.get("jobTemplate", spec)["submitterPodTemplate"]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector (matchLabels, In) takes these labels."""
    expressions = selector.get("matchExpressions", [])
    assert all(expression["operator"] == "In" for expression in expressions)
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(expression["key"]) in expression["values"] for expression in expressions
    )
