"""files/serve.sh, with programs in the place of Ray and latentray that do as they are told."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.chart import CHART

SCRIPT = CHART / "files" / "serve.sh"
_RAY = """#!/bin/bash
trap 'echo ray ended >> "$TOLD"; exit 0' TERM
echo ray started >> "$TOLD"
while [[ ! -e $STOP_RAY ]]; do sleep 0.05; done
"""
_LATENTRAY = """#!/bin/bash
until grep -q "ray started" "$TOLD"; do sleep 0.02; done
echo "$@" >> "$TOLD"
{
  read -r code
  cat > "$CODES.rest"
} < "$CODES"
mv "$CODES.rest" "$CODES"
if [[ -n $code ]]; then exit "$code"; fi
trap 'echo draining >> "$TOLD"; sleep 0.5; echo drained >> "$TOLD"; exit 0' TERM
echo serving >> "$TOLD"
while :; do sleep 0.05; done
"""


class Container:
    """The script in a process group of its own. codes: latentray's exits, one a start; then it serves."""

    def __init__(self, folder: Path, codes: list[int], **environment: str) -> None:
        self._told = folder / "told"
        self._told.touch()
        self._stop_ray = folder / "stop-ray"
        (folder / "codes").write_text("".join(f"{code}\n" for code in codes) + "\n")
        for name, text in (("ray", _RAY), ("latentray", _LATENTRAY)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.process = subprocess.Popen(
            ["/bin/bash", str(SCRIPT)],
            env={
                "PATH": f"{folder}:{os.environ['PATH']}",
                "KUBERAY_GEN_RAY_START_CMD": "ray start  --address=head:6379  --block  --num-cpus=0 ",
                "TOLD": str(self._told),
                "CODES": str(folder / "codes"),
                "STOP_RAY": str(self._stop_ray),
                "RETRY_SECONDS": "0.1",
                "DRAIN_SECONDS": "17",
            }
            | environment,
            start_new_session=True,
        )

    def told(self) -> list[str]:
        return self._told.read_text().splitlines()

    def wait_for(self, line: str, times: int = 1) -> None:
        deadline_s = time.monotonic() + 30
        while self.told().count(line) < times:
            assert time.monotonic() < deadline_s, self.told()
            time.sleep(0.02)

    def end_ray(self) -> None:
        self._stop_ray.touch()


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[list[Container]]:
    started: list[Container] = []
    yield started
    for container in started:
        container.end_ray()
        if container.process.poll() is None:
            os.killpg(container.process.pid, signal.SIGKILL)
            container.process.wait()


def _start(containers: list[Container], folder: Path, codes: list[int], **environment: str) -> Container:
    containers.append(Container(folder, codes, **environment))
    return containers[-1]


@pytest.mark.parametrize("to_group", [False, True], ids=["to_process", "to_group"])
def test_sigterm_drains_while_the_ray_node_lives(
    containers: list[Container], tmp_path: Path, to_group: bool
) -> None:
    container = _start(containers, tmp_path, [])
    container.wait_for("serving")
    (os.killpg if to_group else os.kill)(container.process.pid, signal.SIGTERM)
    assert container.process.wait(30) == 0
    assert container.told()[-2:] == ["drained", "ray ended"]
    assert "serve --drain-timeout 17" in container.told()


def test_a_cluster_without_room_is_asked_again(containers: list[Container], tmp_path: Path) -> None:
    container = _start(containers, tmp_path, [4, 4])
    container.wait_for("serving")
    assert container.told().count("serve --drain-timeout 17") == 3
    assert container.told().count("ray started") == 1


@pytest.mark.parametrize(
    ("code", "environment"),
    [(2, {}), (5, {}), (4, {"STARTUP_SECONDS": "0"})],
    ids=["wrong_setting", "fault", "no_room_for_too_long"],
)
def test_other_ends_are_the_containers(
    containers: list[Container], tmp_path: Path, code: int, environment: dict[str, str]
) -> None:
    container = _start(containers, tmp_path, [code], **environment)
    assert container.process.wait(30) == code
    assert container.told().count("serve --drain-timeout 17") == 1
    assert container.told()[-1] == "ray ended"


def test_the_end_of_the_ray_node_is_the_containers(containers: list[Container], tmp_path: Path) -> None:
    container = _start(containers, tmp_path, [])
    container.wait_for("serving")
    container.end_ray()
    assert container.process.wait(30) == 1
    assert "drained" in container.told()


def test_sigterm_between_two_tries_ends_it(containers: list[Container], tmp_path: Path) -> None:
    container = _start(containers, tmp_path, [4], RETRY_SECONDS="60")
    container.wait_for("serve --drain-timeout 17")
    time.sleep(0.3)
    container.process.terminate()
    assert container.process.wait(30) in (0, 4)
    assert container.told()[-1] == "ray ended"
