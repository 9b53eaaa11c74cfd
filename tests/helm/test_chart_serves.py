"""The rendered command and the rendered file start the real programs: Ray nodes, a server, one token."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.chart import ROOT, Renderer, one
from tests.support.network_cluster import NetworkCluster, missing_requirement

_MISSING = missing_requirement()
pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.slow]


@dataclass
class Pod:
    """The server's container, as far as a machine without Kubernetes has it."""

    process: subprocess.Popen[bytes]
    documents: list[dict[str, Any]]
    environment: dict[str, str]
    config: dict[str, Any]
    log: Path

    def get(self, probe: str) -> int:
        """The status that the kubelet would see; 0 where nobody listens."""
        cluster = one(self.documents, "RayCluster")["spec"]
        [container] = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"]
        asked = container[probe]["httpGet"]
        [port] = [p["containerPort"] for p in container["ports"] if p["name"] == asked["port"]]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", asked["path"])
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture
def pod(chart: Renderer, tmp_path: Path) -> Iterator[Pod]:
    port, http_port, metrics_port, gcs_port = _free_ports(4)
    config = {
        "host": "0.0.0.0",
        "insecure": True,
        "port": port,
        "http-port": http_port,
        "metrics-port": metrics_port,
        "max-model-len": 256,
        "kv-cache-memory-bytes": 16 * 2**20,
        "max-num-seqs": 8,
        "log-dir": str(tmp_path / "logs"),
    }
    # sockets have short names: not below tmp_path
    ray_folder = tempfile.mkdtemp(prefix="lr-", dir="/tmp")
    documents = chart.documents({"config": config, "server": {"drainSeconds": 60}})
    for name, text in one(documents, "ConfigMap")["data"].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latentray").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cluster "$@"\n')
    (tmp_path / "latentray").chmod(0o755)
    group = one(documents, "RayCluster")["spec"]["workerGroupSpecs"][0]
    [container] = group["template"]["spec"]["containers"]
    given = {v["name"]: v["value"] for v in container["env"] if v["name"] not in ("HOME", "USER")}
    parameters = " ".join(f"--{name}={value} " for name, value in group["rayStartParams"].items())
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("LATENTRAY_", "RAY_"))}
    environment = (
        kept
        | given
        | {
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{kept['PATH']}",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "LATENTRAY_CONFIG": str(tmp_path / "latentray.yaml"),
            # What KubeRay puts in; here the node is a head, for there is no other.
            "KUBERAY_GEN_RAY_START_CMD": f"ray start --head --port={gcs_port} --node-ip-address=127.0.0.1 "
            f"--include-dashboard=false --temp-dir={ray_folder} {parameters} --block ",
            "RAY_ADDRESS": f"127.0.0.1:{gcs_port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "a-token-of-at-least-thirty-two-characters",
            "RETRY_SECONDS": "1",
        }
    )
    command = [part.replace("/etc/latentray", str(tmp_path)) for part in container["command"]]
    log = tmp_path / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=tmp_path, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield Pod(process, documents, environment, config, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(90)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(ray_folder, ignore_errors=True)


def _wait_until_ready(pod: Pod) -> None:
    deadline_s = time.monotonic() + 200
    while pod.get("readinessProbe") != 200:
        assert pod.process.poll() is None, pod.log.read_text()
        assert time.monotonic() < deadline_s, pod.log.read_text()
        time.sleep(0.2)


def _stream(pod: Pod) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", pod.config["http-port"], timeout=120)
    body = {
        "prompt": "The SELECT statement",
        "max_tokens": 200,
        "seed": 7,
        "stream": True,
        "ignore_eos": True,
    }
    connection.request(
        "POST", "/v1/completions", json.dumps(body), headers={"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    assert response.status == 200
    return response


def test_a_pod_serves_one_token_and_drains(pod: Pod, tmp_path: Path) -> None:
    _wait_until_ready(pod)
    assert pod.get("livenessProbe") == pod.get("startupProbe") == 200
    # the pod of `helm test`
    [tester] = one(pod.documents, "Pod")["spec"]["containers"]
    asked = [part.replace("demo-latentray:", "127.0.0.1:") for part in tester["command"]]
    answer = subprocess.run(asked, env=pod.environment, cwd=tmp_path, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)
    # a stream that has begun, and the end of the pod
    response = _stream(pod)
    first = response.readline()
    assert first.startswith(b"data: "), first
    os.killpg(pod.process.pid, signal.SIGTERM)
    rest = [line for line in response.read().split(b"\n\n") if line.strip()]
    assert rest[-1].strip() == b"data: [DONE]"
    assert b'"finish_reason":"length"' in rest[-2].replace(b" ", b"")
    assert pod.process.wait(90) == 0, pod.log.read_text()
    assert "Traceback" not in pod.log.read_text()


@pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
def test_a_server_without_cpus_takes_those_of_a_worker(chart: Renderer, tmp_path: Path) -> None:
    """Three nodes as the chart makes them: a head and a server without CPUs of Ray's account, a worker."""
    config = {
        "host": "0.0.0.0",
        "insecure": True,
        "port": 50051,
        "http-port": 8000,
        "max-model-len": 256,
        "kv-cache-memory-bytes": 16 * 2**20,
        "log-dir": str(tmp_path / "logs"),
    }
    values = {
        "config": config,
        "server": {"rayCpus": 0},
        "workers": [{"name": "shards", "replicas": 1, "rayCpus": 2}],
    }
    documents = chart.documents(values)
    for name, text in one(documents, "ConfigMap")["data"].items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latentray").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m cluster "$@"\n')
    (tmp_path / "latentray").chmod(0o755)
    cluster_spec = one(documents, "RayCluster")["spec"]
    server, worker = cluster_spec["workerGroupSpecs"]
    groups = [cluster_spec["headGroupSpec"], worker, server]
    num_cpus = [int(group["rayStartParams"]["num-cpus"]) for group in groups]
    assert num_cpus == [0, 2, 0]
    with NetworkCluster(tmp_path, num_cpus=num_cpus) as nodes:
        variables = {
            "LATENTRAY_CONFIG": tmp_path / "latentray.yaml",
            "RAY_ADDRESS": f"{nodes.address(0)}:6379",
            "KUBERAY_GEN_RAY_START_CMD": "sleep infinity",  # the node of the server runs already
            "OMP_NUM_THREADS": 1,
        }
        script = f'echo $$ > pid; export PATH="{tmp_path}:$PATH"; exec bash {tmp_path / "serve.sh"}'
        told = [f"{name}={value}" for name, value in variables.items()]
        process = nodes.start(2, "env", *told, "setsid", "--wait", "bash", "-c", script)
        asked = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/ready').status)"
        deadline_s = time.monotonic() + 150
        while nodes.run(2, sys.executable, "-c", asked).returncode:
            assert process.poll() is None, (tmp_path / "driver.stderr").read_text()
            assert time.monotonic() < deadline_s, (tmp_path / "driver.stderr").read_text()
            time.sleep(0.5)
        answer = nodes.run(
            2, str(tmp_path / "latentray"), "generate", "--server", "127.0.0.1:50051", "--json",
            "--max-tokens", "1", "Hello",
        )  # fmt: skip
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)
        facts = nodes.run(2, str(tmp_path / "latentray"), "status", "--json").stdout
        by_node = json.loads(facts)["engine"]["actors_by_node"]
        assert by_node.pop(nodes.address(2)).startswith("gateway at ")
        assert list(by_node) == [nodes.address(1)]
        assert nodes.run(2, "bash", "-c", "kill -TERM -- -$(cat pid)").returncode == 0
        assert process.wait(90) == 0, (tmp_path / "driver.stderr").read_text()
