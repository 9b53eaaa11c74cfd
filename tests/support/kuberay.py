"""What KubeRay's objects may hold, as far as the chart uses them (ray.io/v1 of KubeRay 1.6 and 1.7).

A stand-in for the CRDs: unknown fields, missing ones and what the operator's own validation refuses.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

_CLUSTER = {"rayVersion", "authOptions", "upgradeStrategy", "headGroupSpec", "workerGroupSpecs"}
_HEAD = {"serviceType", "rayStartParams", "template"}
_WORKER = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}
_JOB = {
    "entrypoint", "entrypointNumGpus", "backoffLimit", "activeDeadlineSeconds", "shutdownAfterJobFinishes",
    "ttlSecondsAfterFinished", "submissionMode", "submitterPodTemplate", "rayClusterSpec", "suspend",
}  # fmt: skip
_CRON = {"schedule", "timeZone", "suspend", "jobTemplate"}
_LONGEST_NAME = {"RayCluster": 53, "RayJob": 47, "RayCronJob": 36}


def faults(document: Mapping[str, Any]) -> Iterator[str]:
    """What the API server or the operator would refuse."""
    kind, name, spec = document["kind"], document["metadata"]["name"], document["spec"]
    if document["apiVersion"] != "ray.io/v1":
        yield f"{document['apiVersion']} is not ray.io/v1"
    if len(name) > _LONGEST_NAME[kind] or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"name {name}"
    if kind == "RayCluster":
        yield from _cluster_faults(spec, is_own=True)
    elif kind == "RayJob":
        yield from _job_faults(spec)
    else:
        yield from _unknown(spec, _CRON)
        yield from _job_faults(spec["jobTemplate"])


def _job_faults(job: Mapping[str, Any]) -> Iterator[str]:
    yield from _unknown(job, _JOB)
    if not job["entrypoint"]:
        yield "no entrypoint"
    if job["ttlSecondsAfterFinished"] and not job["shutdownAfterJobFinishes"]:
        yield "ttlSecondsAfterFinished without shutdownAfterJobFinishes"
    yield from _cluster_faults(job["rayClusterSpec"], is_own=False)


def _cluster_faults(cluster: Mapping[str, Any], *, is_own: bool) -> Iterator[str]:
    yield from _unknown(cluster, _CLUSTER)
    if not is_own and "upgradeStrategy" in cluster:
        yield "upgradeStrategy of a job's cluster"
    if not set(cluster["authOptions"]) <= {"mode", "secretName"}:
        yield f"authOptions {cluster['authOptions']}"
    yield from _unknown(cluster["headGroupSpec"], _HEAD)
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    if len(set(names)) < len(names):
        yield f"groups {names}"
    for group in cluster["workerGroupSpecs"]:
        yield from _unknown(group, _WORKER)
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            yield f"replicas of {group['groupName']}"
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        yield from (
            f"rayStartParams {k}: {v!r}" for k, v in group["rayStartParams"].items() if type(v) is not str
        )


def _unknown(spec: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    yield from (f"field {name}" for name in spec if name not in known)
