"""What the chart renders, for every helm/ci file: legal objects that belong together."""

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.config import ServeArgs, load_settings
from tests.support.chart import (
    CASES,
    CHART,
    Document,
    Renderer,
    matches,
    one,
    pod_templates,
    ray_clusters,
    values_of,
)
from tests.support.kuberay import faults
from tests.support.kubernetes_schemas import NEWEST, OLDEST, schema_faults

SNAPSHOTS = Path(__file__).parent / "snapshots"
OF_OPERATORS = {"ray.io", "monitoring.coreos.com", "gateway.networking.k8s.io"}
"""API groups that Kubernetes does not bring."""


@pytest.fixture(params=CASES, ids=lambda case: case.stem)
def case(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def documents(chart: Renderer, case: Path) -> list[Document]:
    return chart.documents(values_of(case))


def _group(document: Document) -> str:
    return document["apiVersion"].rpartition("/")[0]


def test_the_oldest_version_is_the_charts() -> None:
    needed = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    assert needed == f">={OLDEST}-0"


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_objects_are_legal(documents: list[Document], version: str) -> None:
    for document in documents:
        if _group(document) not in OF_OPERATORS:
            assert schema_faults(document, version) == [], document["metadata"]["name"]
    for template in pod_templates(documents):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        assert schema_faults(pod, version) == []


def test_the_check_of_objects_can_fail(chart: Renderer) -> None:
    pod = one(chart.documents({}), "Pod")
    pod["spec"]["containers"][0]["porst"] = []
    [fault] = schema_faults(pod, OLDEST)
    assert "porst" in fault


def test_kuberays_objects_are_legal(documents: list[Document]) -> None:
    found = [d for d in documents if _group(d) == "ray.io"]
    assert found
    assert [fault for document in found for fault in faults(document)] == []


def test_the_check_of_kuberays_objects_can_fail(chart: Renderer) -> None:
    cluster = one(chart.documents({}), "RayCluster")
    broken = copy.deepcopy(cluster)
    broken["spec"]["workerGroupSpecs"][0] |= {"numHosts": 2, "minReplicas": 3}
    broken["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    assert list(faults(broken)) == ["field numHosts", "replicas of server", "rayStartParams num-cpus: 0"]


def test_names_fit(documents: list[Document]) -> None:
    for document in documents:
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", document["metadata"]["name"])
        assert len(document["metadata"]["name"]) <= 63
    # KubeRay's: CLUSTER-head-svc, CLUSTER-GROUP-worker-XXXXX
    for document in documents:
        for cluster in ray_clusters([document]):
            groups = [group["groupName"] for group in cluster["workerGroupSpecs"]]
            assert all(len(f"{document['metadata']['name']}-{g}-worker-xxxxx") <= 63 for g in groups)


@pytest.mark.parametrize("release", ["a", "latentray", "x" * 53, f"{'y' * 20}-{'z' * 32}"])
def test_names_fit_whatever_the_release_is_called(chart: Renderer, release: str) -> None:
    values = values_of(Path(CASES[0].parent, "nightly.yaml"))
    documents = chart.documents(values, name=release)
    assert all(len(d["metadata"]["name"]) <= 63 for d in documents)
    assert [f for d in documents if _group(d) == "ray.io" for f in faults(d)] == []


def test_labels_are_legal(documents: list[Document]) -> None:
    everything = [d["metadata"] for d in documents] + [t["metadata"] for t in pod_templates(documents)]
    for metadata in everything:
        for value in metadata["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value)


def _selecting(documents: list[Document]) -> list[tuple[str, dict[str, Any], int]]:
    """By object: the selector of pods, and how many pods of how many templates it expects at least."""
    found = []
    for document in documents:
        name, spec = f"{document['kind']} {document['metadata']['name']}", document.get("spec", {})
        if document["kind"] == "Service":
            found.append((name, {"matchLabels": spec["selector"]}, 1))
        elif document["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            found.append((name, spec["selector"], 1))
        elif document["kind"] == "NetworkPolicy":
            found.append((name, spec["podSelector"], 1))
    return found


def test_selectors_select(documents: list[Document]) -> None:
    labels = [template["metadata"]["labels"] for template in pod_templates(documents)]
    for name, selector, num_templates in _selecting(documents):
        assert sum(matches(selector, of_pod) for of_pod in labels) >= num_templates, name


def test_services_lead_to_the_server_alone(documents: list[Document]) -> None:
    for service in (d for d in documents if d["kind"] == "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        [template] = [t for t in pod_templates(documents) if matches(selector, t["metadata"]["labels"])]
        named = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] == port["name"]
            assert named[port["name"]] == port["port"]


def test_grpc_and_http_are_told_apart(documents: list[Document]) -> None:
    for service in (d for d in documents if d["kind"] == "Service"):
        protocols = {port["name"]: port.get("appProtocol") for port in service["spec"]["ports"]}
        http = "https" if speaks_tls(documents) else "http"
        assert protocols in ({"grpc": "grpc", "http": http}, {"http-metrics": None})


def speaks_tls(documents: list[Document]) -> bool:
    [config] = (
        d["data"]["latentray.yaml"]
        for d in documents
        if d["kind"] == "ConfigMap" and "latentray.yaml" in d["data"]
    )
    return "tls-cert" in config


def test_what_protects_a_server_is_where_its_settings_say(documents: list[Document]) -> None:
    """Secrets' files, which the pods' group may read and others not; probes speak as the server does."""
    for template in pod_templates(documents):
        container = template["spec"]["containers"][0]
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        if "startupProbe" in container:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                scheme = container[probe]["httpGet"].get("scheme", "HTTP")
                assert (scheme == "HTTPS") == speaks_tls(documents)
            assert ("keys" in mounts and "tls" in mounts) == speaks_tls(documents)
        for name in {"keys", "tls"} & mounts.keys():
            assert mounts[name]["readOnly"] is True
            assert mounts[name]["mountPath"] == f"/etc/latentray-{name}"
            assert volumes[name]["secret"].get("defaultMode", 0o400) == 0o400


def test_monitors_find_their_ports(documents: list[Document]) -> None:
    services = [d for d in documents if d["kind"] == "Service"]
    for monitor in (d for d in documents if d["kind"] == "ServiceMonitor"):
        [service] = [s for s in services if matches(monitor["spec"]["selector"], s["metadata"]["labels"])]
        [endpoint] = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    for monitor in (d for d in documents if d["kind"] == "PodMonitor"):
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        selected = [
            t
            for t in pod_templates(documents)
            if matches(monitor["spec"]["selector"], t["metadata"]["labels"])
        ]
        for template in selected:
            ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
            assert endpoint["port"] in ports


def test_routes_lead_to_ports_of_the_service(documents: list[Document]) -> None:
    for route in (d for d in documents if d["kind"] in ("HTTPRoute", "GRPCRoute")):
        [backend] = [b for rule in route["spec"]["rules"] for b in rule["backendRefs"]]
        service = one(documents, "Service", backend["name"])
        [port] = [p for p in service["spec"]["ports"] if p["port"] == backend["port"]]
        assert port["name"] == ("http" if route["kind"] == "HTTPRoute" else "grpc")
    for ingress in (d for d in documents if d["kind"] == "Ingress"):
        [rule] = ingress["spec"]["rules"]
        for path in rule["http"]["paths"]:
            backend = path["backend"]["service"]
            ports = one(documents, "Service", backend["name"])["spec"]["ports"]
            assert backend["port"]["name"] in {port["name"] for port in ports}


def test_pods_are_restricted(documents: list[Document]) -> None:
    """Kubernetes' restricted profile."""
    legal_volumes = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}
    for template in pod_templates(documents):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert all(set(volume) - {"name"} <= legal_volumes for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True


def test_no_service_gives_us_settings(documents: list[Document]) -> None:
    """A Service called latentray puts LATENTRAY_PORT=tcp://... into the environment of its namespace."""
    assert all(template["spec"]["enableServiceLinks"] is False for template in pod_templates(documents))
    for template in pod_templates(documents):
        names = {variable["name"] for variable in template["spec"]["containers"][0]["env"]}
        assert {name for name in names if name.startswith("LATENTRAY_")} <= {
            "LATENTRAY_CONFIG",
            "LATENTRAY_API_KEY",
        }


def test_every_mount_has_its_volume_and_every_volume_its_mount(documents: list[Document]) -> None:
    for template in pod_templates(documents):
        spec = template["spec"]
        mounts = {mount["name"] for c in spec["containers"] for mount in c["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]}


def test_heads_have_no_cpus_and_no_accelerator(documents: list[Document]) -> None:
    for cluster in ray_clusters(documents):
        head = cluster["headGroupSpec"]
        assert head["rayStartParams"]["num-cpus"] == "0"
        limits = head["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert not any("/" in name for name in limits)


def test_probes_and_drain(documents: list[Document]) -> None:
    for cluster in (d["spec"] for d in documents if d["kind"] == "RayCluster"):
        [server] = [g for g in cluster["workerGroupSpecs"] if g["groupName"] == "server"]
        pod = server["template"]["spec"]
        [container] = pod["containers"]
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        start = container["startupProbe"]
        environment = {v["name"]: v.get("value") for v in container["env"]}
        assert start["periodSeconds"] * start["failureThreshold"] >= int(environment["STARTUP_SECONDS"])
        before = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        drain = int(environment["DRAIN_SECONDS"])
        assert pod["terminationGracePeriodSeconds"] >= before + drain + 25


def test_servers_drain_with_the_pods_that_they_need(documents: list[Document]) -> None:
    """An upgrade sends SIGTERM to all pods at once; head and shards outlast the servers' grace period."""
    for cluster in (d["spec"] for d in documents if d["kind"] == "RayCluster"):
        server, *workers = (group["template"]["spec"] for group in cluster["workerGroupSpecs"])
        for spec in [cluster["headGroupSpec"]["template"]["spec"], *workers]:
            [container] = spec["containers"]
            waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert waits >= server["terminationGracePeriodSeconds"]
            assert spec["terminationGracePeriodSeconds"] >= waits + 10


def test_accelerators_are_asked_for(chart: Renderer) -> None:
    def of_server(values: dict[str, Any]) -> tuple[str | None, dict[str, Any], str]:
        cluster = one(chart.documents(values), "RayCluster")["spec"]
        group = cluster["workerGroupSpecs"][0]
        container = group["template"]["spec"]["containers"][0]
        return group["rayStartParams"].get("num-gpus"), container["resources"]["limits"], container["image"]

    for kind, resource, image in (
        ("none", None, "latentray:0.1.0-cpu"),
        ("nvidia", "nvidia.com/gpu", "latentray:0.1.0-cuda"),
        ("amd", "amd.com/gpu", "latentray:0.1.0-rocm"),
    ):
        num_gpus, limits, found = of_server({"server": {"accelerator": kind}})
        assert found == image
        assert num_gpus == (None if resource is None else "1")
        assert {name: count for name, count in limits.items() if "/" in name} == (
            {} if resource is None else {resource: 1}
        )


def test_the_binary_reads_the_rendered_file(documents: list[Document], case: Path, tmp_path: Path) -> None:
    """One vocabulary: what the file says is what the values say, number by number."""
    [config] = [d for d in documents if d["kind"] == "ConfigMap" and "latentray.yaml" in d["data"]]
    file = tmp_path / "latentray.yaml"
    file.write_text(config["data"]["latentray.yaml"])
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())["config"]
    written = defaults | values_of(case).get("config", {})
    settings = load_settings(ServeArgs, config_file=file, environ={})
    for key, value in written.items():
        assert yaml.safe_load(file.read_text()).get(key) == value
        given = load_settings(ServeArgs, {key.replace("-", "_"): value}, environ={}).args
        if key != "speculative-config":
            assert getattr(settings.args, key.replace("-", "_")) == getattr(given, key.replace("-", "_"))


def test_a_changed_setting_changes_the_pods(chart: Renderer) -> None:
    def checksums(values: dict[str, Any]) -> set[str]:
        pods = pod_templates(chart.documents(values))
        return {p["metadata"]["annotations"].get("checksum/config") for p in pods} - {None}

    before, after = checksums({}), checksums({"config": {"max-num-seqs": 63}})
    assert len(before) == len(after) == 1
    assert before != after


def _snapshot(documents: list[Document]) -> str:
    for document in documents:
        for name in document.get("data", {}) if document["kind"] == "ConfigMap" else ():
            if name != "latentray.yaml":
                document["data"][name] = "(a file of the chart)"
    return yaml.safe_dump_all(documents, sort_keys=True, width=110)


def test_snapshot(documents: list[Document], case: Path) -> None:
    """UPDATE_SNAPSHOTS=1 writes them anew: read the difference before you commit it."""
    snapshot = SNAPSHOTS / case.name
    if os.environ.get("UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        snapshot.write_text(_snapshot(documents))
    assert _snapshot(documents) == snapshot.read_text()


def test_every_snapshot_has_its_case() -> None:
    assert {file.name for file in SNAPSHOTS.iterdir()} == {case.name for case in CASES}
