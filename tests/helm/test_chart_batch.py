"""The batch's command as the job on the head gets it, and what of it the binary knows."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cluster.cli.app import app
from tests.support.chart import Renderer, one

_SHOW = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "


def _words(command: str) -> list[str]:
    """What a shell makes of it."""
    shown = subprocess.run(["/bin/bash", "-c", _SHOW + command], capture_output=True, text=True, check=True)
    words: list[str] = json.loads(shown.stdout)
    return words


def _as_the_job_gets_it(entrypoint: str) -> list[str]:
    """KubeRay puts it into the submitter's shell, Ray joins the words for the shell of the job."""
    return _words(subprocess.list2cmdline(_words(entrypoint)))


def _batch(chart: Renderer, **values: Any) -> dict[str, Any]:
    batch = {"enabled": True, "existingClaim": "rows", "input": "/data/in", "output": "/data/out"} | values
    documents = chart.documents({"server": {"enabled": False}, "batch": batch})
    kind = "RayCronJob" if batch.get("schedule") else "RayJob"
    spec: dict[str, Any] = one(documents, kind)["spec"]
    return spec


def test_a_pattern_reaches_the_binary_as_it_is(chart: Renderer, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    job = _batch(chart, mountPath=str(tmp_path), input=f"{tmp_path}/*.jsonl", output=f"{tmp_path}/out")
    assert _as_the_job_gets_it(job["entrypoint"]) == [
        *("latentray", "batch", "--config", "/etc/latentray/latentray.yaml"),
        *("--input", f"{tmp_path}/*.jsonl", "--output", f"{tmp_path}/out"),
    ]


def test_its_flags_are_the_binarys(chart: Renderer) -> None:
    job = _batch(chart, allowFailedRows=True, retryFailed=True)
    command, *flags = [
        word for word in _as_the_job_gets_it(job["entrypoint"])[1:] if not word.startswith("/")
    ]
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert set(flags) <= set(re.findall(r"--[a-z-]+", shown.output))
    assert {"--allow-failed-rows", "--retry-failed"} <= set(flags)


def test_a_schedule_wraps_the_same_job(chart: Renderer) -> None:
    once, nightly = _batch(chart), _batch(chart, schedule="0 2 * * *")
    assert nightly["jobTemplate"] == {name: value for name, value in once.items() if name != "suspend"}
    assert nightly["schedule"] == "0 2 * * *"


def test_a_gpus_driver_runs_beside_the_gpu(chart: Renderer) -> None:
    """The command asks its own machine for a GPU; without one the head, which has no CPUs, runs it."""
    assert "entrypointNumGpus" not in _batch(chart)
    assert _batch(chart, worker={"accelerator": "nvidia"})["entrypointNumGpus"] == 1


def test_retries_have_the_files(chart: Renderer) -> None:
    """Journal and rows lie in the volume, which head and workers mount at one place."""
    cluster = _batch(chart)["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        spec = group["template"]["spec"]
        [mount] = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "data"]
        assert mount == {"name": "data", "mountPath": "/data"}
        [volume] = [v for v in spec["volumes"] if v["name"] == "data"]
        assert volume["persistentVolumeClaim"] == {"claimName": "rows"}
