"""The schema of the chart's values: `python -m helm.values_schema > helm/latentray/values.schema.json`.

`config` is the product's own schema of a config file; the rest is declared here. Every object is closed, and
every value has a description, from which docs/kubernetes.md has its table. Draft 7, which every Helm 3 reads.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from cluster.config.serve_args import ServeArgs
from cluster.config.setting import declared
from helm.schema_parts import (
    AFFINITY,
    DEFINITIONS,
    PARENT,
    PATH,
    PEER,
    QUANTITY,
    SPREAD,
    STRINGS,
    SUBJECT,
    TOLERATION,
    Schema,
    choice,
    closed,
    flag,
    list_of,
    map_of,
    number,
    text,
    whole,
)

_NOT_OF_A_FILE = {"address"}
"""KubeRay tells it."""
_MAX_SEED = 2**53
"""Helm reads numbers as float64."""


def values_schema() -> Schema:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the latentray chart",
        **closed(
            "Values of the latentray chart.",
            fullnameOverride=text(
                "Name of the objects, instead of one made of the release's; 30 characters at most, so that "
                "KubeRay's longer names fit.",
                pattern="^([a-z]([-a-z0-9]{0,28}[a-z0-9])?)?$",
            ),
            image=_IMAGE,
            config=config_schema(),
            env=map_of(
                "Environment of every container, by name.", text("A value."), "^[A-Za-z_][A-Za-z0-9_]*$"
            ),
            model=_MODEL,
            access=_ACCESS,
            ray=_RAY,
            head=closed(
                "Pod of Ray's head, without accelerator and CPUs of Ray's account.", _pod(disrupted=True)
            ),
            server=_SERVER,
            workers=list_of(
                "Ray's worker groups, for what does not fit into the server's pod.",
                closed("A worker group.", _WORKER, required=("name", "replicas", "rayCpus")),
            ),
            batch=_BATCH,
            service=closed(
                "The Service of gRPC and HTTP.",
                type=choice("Its type.", "ClusterIP", "NodePort", "LoadBalancer"),
                annotations=STRINGS | {"description": "Its annotations."},
            ),
            ingress=_INGRESS,
            httpRoute=_route("An HTTPRoute of the Gateway API.", paths=_paths()),
            grpcRoute=_route("A GRPCRoute of the Gateway API."),
            serviceAccount=closed(
                "The pods' ServiceAccount. It needs no permission.",
                create=flag("Make one."),
                name=text("Its name, instead of the release's."),
                annotations=STRINGS | {"description": "Its annotations."},
            ),
            rbac=closed(
                "Roles for people.",
                viewers=list_of(
                    "Who may read the release's objects and logs: subjects of a RoleBinding.", SUBJECT
                ),
            ),
            podSecurity=closed(
                "What is open in the restricted security contexts.",
                runAsUser=whole("User and group of every process.", minimum=1),
                fsGroup=whole("Group of volumes.", minimum=1),
                readOnlyRootFilesystem=flag("Let nothing write outside the volumes."),
            ),
            networkPolicy=_NETWORK_POLICY,
            monitoring=_MONITORING,
        ),
        "definitions": DEFINITIONS,
    }


def config_schema() -> Schema:
    """The product's schema of a config file, as the chart takes it: with dashes, and ports known before."""
    product = ServeArgs.model_json_schema()
    settings = declared(ServeArgs)
    properties = {
        settings[name].key: _of_product(schema, product.get("$defs", {}))
        for name, schema in product["properties"].items()
        if name not in _NOT_OF_A_FILE
    }
    port = {"type": "integer", "minimum": 1, "maximum": 65535}
    properties["port"] = whole("Port of gRPC.", **_bounds(port))
    properties["http-port"] = whole("Port of OpenAI's API, and of the probes.", **_bounds(port))
    properties["metrics-port"] = {
        "description": "Port of Prometheus metrics; null: only under /metrics of http-port.",
        "anyOf": [port, {"type": "null"}],
    }
    properties["seed"] |= {"maximum": _MAX_SEED}
    properties["seed"].pop("exclusiveMaximum", None)
    return {
        "description": "The file of settings: docs/settings.md.",
        "type": "object",
        "additionalProperties": False,
        "required": ["host", "port", "http-port"],
        "properties": properties,
    }


def _bounds(schema: Schema) -> Schema:
    return {key: schema[key] for key in ("minimum", "maximum")}


def _of_product(schema: Any, definitions: Mapping[str, Schema]) -> Any:
    """Without references, defaults (they are the binary's) and titles; tuples as draft 7 writes them."""
    if isinstance(schema, list):
        return [_of_product(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _of_product(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    result = {
        key: {name: _of_product(value, definitions) for name, value in item.items()}
        if key == "properties"
        else _of_product(item, definitions)
        for key, item in schema.items()
        if key not in ("default", "title")
    }
    if "prefixItems" in result:
        result["items"] = result.pop("prefixItems")
        result["additionalItems"] = False
    return result


def _pod(*, disrupted: bool) -> dict[str, Schema]:
    """What every kind of pod has. disrupted: a PodDisruptionBudget too."""
    quantities = {"type": "object", "additionalProperties": QUANTITY}
    schema = {
        "resources": closed(
            "Requests and limits of the container; the chart adds the accelerator.",
            requests={"description": "Requests.", **quantities},
            limits={"description": "Limits.", **quantities},
        ),
        "sharedMemory": {"description": "Size of /dev/shm, a part of the memory limit.", **QUANTITY},
        "scratch": {"description": "Size of /tmp and the home, with Ray's and our logs.", **QUANTITY},
        "nodeSelector": STRINGS | {"description": "Labels that the node must have."},
        "tolerations": list_of("Taints that are tolerated.", TOLERATION),
        "affinity": AFFINITY,
        "topologySpreadConstraints": list_of("How the pods spread.", SPREAD),
        "priorityClassName": text("Priority class."),
        "labels": STRINGS | {"description": "Further labels of the pod."},
        "annotations": STRINGS | {"description": "Further annotations of the pod."},
    }
    if disrupted:
        schema["maxDisrupted"] = whole(
            "Pods that a drain of nodes may evict at a time. 0: none; then a person deletes the pod."
        )
    return schema


def _accelerator() -> Schema:
    return choice(
        "One GPU: nvidia (nvidia.com/gpu) or amd (amd.com/gpu); none computes on the CPU.",
        "none",
        "nvidia",
        "amd",
    )


def _ray_cpus(role: str) -> Schema:
    return whole(f"CPUs of Ray's account of {role}: a group takes one for its coordinator and one a shard.")


def _paths() -> Schema:
    return {
        **list_of("Prefixes of paths that are let in.", {"type": "string", "pattern": "^/"}),
        "minItems": 1,
    }


def _route(description: str, **more: Schema) -> Schema:
    return closed(
        description,
        more,
        enabled=flag("Make it."),
        parentRefs=list_of("Gateways that it belongs to.", PARENT),
        hostnames=list_of("Host names; none: all of the Gateway's.", text("")),
    )


_IMAGE = closed(
    "The image, as docker/ makes it.",
    repository=text("Repository.", minLength=1),
    tag=text("Tag; empty: VERSION-cpu, VERSION-cuda or VERSION-rocm, by accelerator."),
    pullPolicy=choice("When it is pulled.", "Always", "IfNotPresent", "Never"),
    pullSecrets=list_of("Names of Secrets for the registry.", text("", minLength=1)),
)
_MODEL = closed(
    "Where the checkpoint comes from.",
    existingClaim=text(
        "PersistentVolumeClaim with checkpoints, mounted read-only; empty: the bundled model."
    ),
    mountPath=text("Where it is mounted; config.model is a directory below.", pattern=PATH),
    download=closed(
        "A Job that fetches a checkpoint from the Hugging Face hub into the volume.",
        enabled=flag("Run it."),
        repository=text("OWNER/NAME on the hub.", pattern="^([A-Za-z0-9._-]+/[A-Za-z0-9._-]+)?$"),
        revision=text("Branch, tag or commit.", minLength=1),
        directory=text("Directory in the volume.", pattern="^([A-Za-z0-9_][A-Za-z0-9._-]*)?$"),
        tokenSecret=text("Existing Secret with the hub's token; empty: none."),
        tokenKey=text("Its key.", minLength=1),
    ),
)
_ACCESS = closed(
    "Who is served: docs/security.md. Changed Secrets are in force without a restart.",
    apiKeysSecret=text(
        "Existing Secret with the file of API keys under keys.yaml, and one of the keys under test-key for "
        "`helm test`; empty: everybody who reaches the ports is served."
    ),
    tlsSecret=text(
        "Existing Secret of type kubernetes.io/tls (tls.crt, tls.key, ca.crt), for the name of the Service; "
        "gRPC, HTTP and metrics speak TLS. Empty: in the clear."
    ),
)
_RAY = closed(
    "Of all Ray clusters of the chart.",
    version=text("Version of Ray in the image.", pattern="^[0-9]+\\.[0-9]+\\.[0-9]+$"),
    authSecret=text("Existing Secret with Ray's token under auth_token; empty: KubeRay makes one."),
    upgradeStrategy=choice(
        "What a changed chart does to running pods. Recreate: all end (servers drain) and start anew. None: "
        "they stay until somebody deletes them.",
        "Recreate",
        "None",
    ),
)
_SERVER = closed(
    "Pods that run `latentray serve`: a gateway each, and where rayCpus says so its groups.",
    _pod(disrupted=True),
    enabled=flag("Serve."),
    replicas=whole("Servers; each has groups of its own.", minimum=1),
    rayCpus=_ray_cpus("a server's pod") | {"maximum": 1024},
    accelerator=_accelerator(),
    drainSeconds=whole("How long live requests may go on after SIGTERM (--drain-timeout)."),
    endpointSeconds=whole("How long a pod that ends still serves, until no new request comes.", minimum=1),
    startupSeconds=whole("How long the model may load.", minimum=60),
    livenessSeconds=whole(
        "How long a server may be unable to produce a token before it is restarted.", minimum=30
    ),
)
_WORKER = {
    "name": text("Name of the group.", pattern="^[a-z]([-a-z0-9]{0,18}[a-z0-9])?$"),
    "replicas": whole("How many of it.", minimum=1),
    "numOfHosts": whole("Pods of one replica, for groups that span hosts; 1 if left out.", minimum=1),
    "rayCpus": _ray_cpus("one of its pods") | {"minimum": 1},
    **_pod(disrupted=True),
}
_BATCH = closed(
    "A RayJob that answers a file of OpenAI batch rows, or with a schedule a RayCronJob.",
    enabled=flag("Run it."),
    schedule=text("Cron schedule; empty: once, now. Needs KubeRay's feature gate RayCronJob."),
    timeZone=text(
        "Time zone of the schedule, such as Europe/Berlin (KubeRay 1.7 or newer); empty: the operator's."
    ),
    suspend=flag("Do not start, or do not schedule, for now."),
    existingClaim=text("PersistentVolumeClaim with the files, mounted on head and workers."),
    mountPath=text("Where it is mounted.", pattern=PATH),
    input=text(
        "Rows: a file, a directory or a pattern below mountPath (docs/batch.md).",
        pattern="^((/[A-Za-z0-9._*?-]+)+/?)?$",
    ),
    output=text("File of answers, below mountPath.", pattern=f"({PATH})|^$"),
    allowFailedRows=flag("Succeed although rows have failed."),
    retryFailed=flag("Ask once more for rows that have failed in earlier runs."),
    backoffLimit=whole("Retries. Each starts a new cluster, and goes on where the one before it ended."),
    activeDeadlineSeconds=whole("Seconds that the job may take.", minimum=1),
    ttlSecondsAfterFinished=whole("Seconds until its cluster is removed."),
    worker=closed(
        "Its worker pods.",
        _pod(disrupted=False),
        replicas=whole("Pods.", minimum=1),
        rayCpus=_ray_cpus("one of them") | {"minimum": 1},
        accelerator=_accelerator(),
    ),
)
_INGRESS = closed(
    "An Ingress for HTTP.",
    enabled=flag("Make it."),
    className=text("Its class; empty: the cluster's default."),
    host=text("Host name."),
    paths=_paths(),
    tlsSecret=text("Existing Secret with the certificate; empty: no TLS."),
    annotations=STRINGS | {"description": "Its annotations, such as those for long streams."},
)
_NETWORK_POLICY = closed(
    "Who reaches the pods.",
    enabled=flag("Make the policies."),
    clients=list_of("Who reaches gRPC and HTTP.", PEER),
    monitoring=list_of("Who reaches the metrics.", PEER),
    operator=list_of("Where KubeRay runs; it asks Ray's dashboard for the state of jobs.", PEER),
    restrictEgress=flag("Let pods reach each other and DNS alone. A download needs more: egress."),
    egress=list_of("Whom they reach besides, under restrictEgress.", PEER),
)
_MONITORING = closed(
    "Objects of the Prometheus operator and of Grafana.",
    labels=STRINGS | {"description": "Labels of monitors and rules, for which the operator may look."},
    interval=text("Between two scrapes.", pattern="^[0-9]+(ms|s|m)$"),
    serviceMonitor=flag("Scrape latentray's metrics."),
    podMonitor=flag("Scrape Ray's own metrics."),
    rules=flag("Make alerts."),
    dashboards=flag("Make a ConfigMap with the Grafana dashboard."),
    dashboardLabels=STRINGS | {"description": "Labels of that ConfigMap, for which Grafana's sidecar looks."},
    alerts=closed(
        "Thresholds of alerts.",
        waitingRequests=number("Requests that wait, for 10 minutes."),
        firstTokenSeconds=number("Seconds until the first token, of 95 in 100 requests."),
        preemptionsPerSecond=number("Preemptions."),
    ),
)


if __name__ == "__main__":
    json.dump(values_schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
