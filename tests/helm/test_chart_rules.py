"""Values that cannot work are refused: at their path, or with the fix."""

from typing import Any

import pytest

from tests.support.chart import ChartError, Renderer

GPU = {"accelerator": "nvidia"}
BATCH = {"enabled": True, "existingClaim": "rows", "input": "/data/in", "output": "/data/out"}


def _refusal(chart: Renderer, values: dict[str, Any], name: str = "demo") -> str:
    with pytest.raises(ChartError) as refused:
        chart.documents(values, name=name)
    return str(refused.value)


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"servre": {}}, "servre"),
        ({"server": {"replica": 2}}, "/server"),
        ({"server": {"accelerator": "tpu"}}, "/server/accelerator"),
        ({"server": {"drainSeconds": "30"}}, "/server/drainSeconds"),
        ({"server": {"drainSeconds": -1}}, "/server/drainSeconds"),
        ({"server": {"sharedMemory": "1 GB"}}, "/server/sharedMemory"),
        ({"server": {"resources": {"limits": {"memory": 8}}}}, "/server/resources/limits/memory"),
        ({"server": {"resources": {"claims": []}}}, "/server/resources"),
        ({"server": {"tolerations": [{"kye": "x"}]}}, "/server/tolerations/0"),
        ({"server": {"topologySpreadConstraints": [{"maxSkew": 1}]}}, "/server/topologySpreadConstraints/0"),
        ({"head": {"affinity": {"podAffinity": {"must": []}}}}, "/head/affinity/podAffinity"),
        ({"workers": [{"name": "a", "replicas": 1, "rayCpus": 0}]}, "/workers/0/rayCpus"),
        ({"workers": [{"name": "A", "replicas": 1, "rayCpus": 1}]}, "/workers/0/name"),
        ({"workers": [{"name": "a", "replicas": 1, "rayCpus": 1, "accelerator": "nvidia"}]}, "/workers/0"),
        ({"config": {"max_num_seqs": 8}}, "/config"),
        ({"config": {"address": "auto"}}, "/config"),
        ({"config": {"max-num-seqs": 0}}, "/config/max-num-seqs"),
        ({"config": {"dtype": "float16"}}, "/config/dtype"),
        ({"config": {"http-port": "none"}}, "/config/http-port"),
        ({"config": {"port": 0}}, "/config/port"),
        ({"config": {"kv-cache-memory-bytes": "1 PB"}}, "/config/kv-cache-memory-bytes"),
        ({"config": {"seed": 2**60}}, "/config/seed"),
        ({"config": {"speculative-config": {"num_speculative_tokens": 9}}}, "/config/speculative-config"),
        ({"fullnameOverride": "Upper"}, "/fullnameOverride"),
        ({"fullnameOverride": "x" * 31}, "/fullnameOverride"),
        ({"env": {"A B": "1"}}, "/env"),
        ({"env": {"A": 1}}, "/env/A"),
        ({"model": {"mountPath": "models"}}, "/model/mountPath"),
        ({"batch": {"input": "/data/a b"}}, "/batch/input"),
        ({"rbac": {"viewers": [{"kind": "Robot", "name": "x"}]}}, "/rbac/viewers/0/kind"),
        ({"networkPolicy": {"clients": [{"ip": "10.0.0.0/8"}]}}, "/networkPolicy/clients/0"),
        ({"httpRoute": {"paths": ["v1"]}}, "/httpRoute/paths/0"),
        ({"monitoring": {"interval": "often"}}, "/monitoring/interval"),
    ],
    ids=str,
)
def test_illegal_values_are_refused_at_their_path(chart: Renderer, values: dict[str, Any], path: str) -> None:
    message = _refusal(chart, values)
    assert f"'{path}" in message


@pytest.mark.parametrize(
    ("values", "problem", "fix"),
    [
        ({"server": {"enabled": False}}, "nothing to install", "set one of them"),
        ({"config": {"host": "127.0.0.1"}}, "config.host is 127.0.0.1", "use 0.0.0.0"),
        (
            {"config": {"insecure": False}},
            "config.insecure is false",
            "set access.apiKeysSecret and access.tls",
        ),
        (
            {"config": {"insecure": False}, "access": {"apiKeysSecret": "keys"}},
            "needs keys and TLS",
            "config.insecure: true",
        ),
        ({"config": {"api-keys": "/keys"}}, "config.api-keys is a file", "set access.apiKeysSecret"),
        (
            {"access": {"tlsSecret": "tls"}, "ingress": {"enabled": True, "host": "a.b"}},
            "access.tlsSecret makes the server speak TLS",
            "leave access.tlsSecret out",
        ),
        ({"config": {"port": 8000}}, "config.http-port is 8000, which config.port has", "another port"),
        ({"config": {"metrics-port": 8080}}, "Ray's metrics", "another port"),
        ({"env": {"LATENTRAY_MAX_NUM_SEQS": "8"}}, "env.LATENTRAY_MAX_NUM_SEQS", "write config.max-num-seqs"),
        ({"env": {"RAY_ADDRESS": "auto"}}, "env.RAY_ADDRESS", "leave it out"),
        ({"config": {"model": "/models/x"}}, "nothing is mounted", "set model.existingClaim"),
        ({"model": {"existingClaim": "m"}}, "the bundled model", "set config.model: /models/DIRECTORY"),
        (
            {"model": {"existingClaim": "m"}, "config": {"model": "/modelsx/a"}},
            "config.model is /modelsx/a",
            "set config.model: /models/DIRECTORY",
        ),
        ({"model": {"download": {"enabled": True}}}, "model.download needs", "set model.existingClaim"),
        (
            {
                "model": {
                    "existingClaim": "m",
                    "download": {"enabled": True, "repository": "a/b", "directory": "b"},
                },
                "config": {"model": "/models/c"},
            },
            "into /models/b, but config.model is /models/c",
            "make them the same",
        ),
        (
            {"server": GPU, "workers": [{"name": "a", "replicas": 1, "rayCpus": 1}]},
            "the group runs in the server's pod",
            "set workers: []",
        ),
        ({"server": GPU, "config": {"device": "cpu"}}, "config.device is cpu", "leave config.device out"),
        ({"server": GPU, "config": {"tensor-parallel-size": 2}}, "not supported yet", "use 1"),
        ({"server": GPU | {"rayCpus": 1}}, "server.rayCpus is 1", "use 2"),
        ({"config": {"device": "cuda"}}, "server.accelerator is none", "to nvidia or amd"),
        ({"server": {"replicas": 2}}, "would stop its streams", "set server.rayCpus: 0"),
        (
            {
                "server": {"rayCpus": 0},
                "workers": [{"name": n, "replicas": 1, "rayCpus": 2} for n in ("a", "a")],
            },
            'two groups "a"',
            "a name of its own",
        ),
        (
            {"workers": [{"name": "a", "replicas": 2, "numOfHosts": 2, "rayCpus": 1, "maxDisrupted": 5}]},
            "the group has 4 pods",
            "use at most that",
        ),
        ({"head": {"maxDisrupted": 2}}, "head.maxDisrupted is 2, but there is 1", "use at most that"),
        (
            {"config": {"tensor-parallel-size": 4}},
            "4 shards take 5 CPUs of Ray's account, and server.rayCpus and workers have 2",
            "raise rayCpus",
        ),
        ({"server": {"livenessSeconds": 60}}, "config.heartbeat-timeout (60 s)", "use more"),
        ({"server": {"livenessSeconds": 300}}, "config.recovery-timeout (300 s)", "use more"),
        ({"config": {"step-timeout": 600}}, "config.step-timeout (600 s)", "use more"),
        (
            {"config": {"num-groups": 2}},
            "2 groups of a coordinator and 1 shards take 4 CPUs",
            "raise rayCpus",
        ),
        ({"server": GPU | {"rayCpus": 4}, "config": {"num-groups": 2}}, "would share one GPU", "use 1"),
        (
            {
                "server": {"enabled": False},
                "batch": BATCH,
                "workers": [{"name": "a", "replicas": 1, "rayCpus": 1}],
            },
            "workers belong to the server",
            "batch.worker",
        ),
        ({"batch": {"enabled": True}}, "files of a volume", "set batch.existingClaim"),
        ({"batch": BATCH | {"input": "/dat/in"}}, "batch.input is /dat/in", "a path below it"),
        (
            {"batch": BATCH | {"worker": {"rayCpus": 1}}},
            "batch.worker has 1",
            "raise batch.worker.rayCpus",
        ),
        ({"batch": BATCH | {"worker": GPU | {"replicas": 2}}}, "not supported yet", "replicas 1"),
        ({"batch": BATCH | {"worker": GPU}, "config": {"device": "cpu"}}, "config.device is cpu", "leave"),
        (
            {"batch": BATCH, "config": {"device": "cuda"}, "server": GPU},
            "batch.worker.accelerator is none",
            "set",
        ),
        ({"batch": BATCH | {"timeZone": "UTC"}}, "there is no schedule", "set batch.schedule"),
        ({"ingress": {"enabled": True}}, "needs a host name", "set ingress.host"),
        ({"httpRoute": {"enabled": True}}, "needs a Gateway", "set httpRoute.parentRefs"),
        ({"grpcRoute": {"enabled": True}}, "needs a Gateway", "set grpcRoute.parentRefs"),
        (
            {"server": {"enabled": False}, "batch": BATCH, "ingress": {"enabled": True, "host": "h"}},
            "ingress leads to the server",
            "set ingress.enabled: false",
        ),
        (
            {"monitoring": {"serviceMonitor": True}, "config": {"metrics-port": None}},
            "monitoring.serviceMonitor needs",
            "config.metrics-port",
        ),
        (
            {"server": {"enabled": False}, "batch": BATCH, "monitoring": {"rules": True}},
            "monitoring.rules needs",
            "server.enabled: true",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_cannot_work_together_is_refused_with_the_fix(
    chart: Renderer, values: dict[str, Any], problem: str, fix: str
) -> None:
    message = _refusal(chart, values)
    assert problem in message
    assert fix in message.split(problem, 1)[1]


def test_a_release_that_makes_no_name_is_told_what_to_do(chart: Renderer) -> None:
    assert "set fullnameOverride" in _refusal(chart, {}, name="7b")
    assert chart.documents({"fullnameOverride": "seven"}, name="7b")
