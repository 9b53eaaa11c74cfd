"""Jobs: what is submitted, and a log that is followed over connections that break."""

import asyncio
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes
from ray.job_submission import JobStatus

from cluster.cli.submit import _submitted
from cluster.jobs.follow import PATIENCE_S, JobEnd, follow
from cluster.jobs.submission import Submission, plan_submission
from kernels_integration.errors import ConfigError, UnavailableError
from tests.support.cli_process import ROOT, environment

COMMANDS = ("serve", "batch", "generate")
BATCH = ("batch", "-i", "/data/in.jsonl", "-o", "/data/out file.jsonl", "-tp", "2")


def plan(*words: str, root: Path = Path("/root"), runtime_env_json: str | None = None) -> Submission:
    return plan_submission(
        words, commands=COMMANDS, python="python", root=root, runtime_env_json=runtime_env_json
    )


def test_the_entrypoint_is_a_command_line() -> None:
    submission = plan(*BATCH)
    assert shlex.split(submission.entrypoint) == ["python", "-m", "cluster", *BATCH]


def test_rays_own_command_says_the_same() -> None:
    submission = plan(*BATCH, runtime_env_json='{"env_vars": {"A": "it\'s"}, "excludes": ["*.bin"]}')
    words = shlex.split(submission.as_command("http://head:8265"))
    assert words[:5] == ["ray", "job", "submit", "--address", "http://head:8265"]
    dashes = words.index("--")
    assert words[dashes + 1 :] == ["python", "-m", "cluster", *BATCH]
    flags = dict(zip(words[3:dashes:2], words[4:dashes:2], strict=True))
    env = json.loads(flags["--runtime-env-json"]) | {"working_dir": flags["--working-dir"]}
    assert env == submission.runtime_env
    assert env["env_vars"] == {"A": "it's"}
    assert env["excludes"][-1] == "*.bin"


def test_a_job_brings_our_packages_alone(tmp_path: Path) -> None:
    """Ray's own rules decide."""
    ours = ("cluster/a.py", "cluster/assets/m.safetensors", "actors/b/c.py", "kernels_integration/d.py")
    for name in (
        *ours,
        ".git/x",
        ".venv/x",
        "tests/x.py",
        "big.bin",
        "cluster/__pycache__/a.pyc",
        "o/cluster/x",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found: list[str] = []

    def visit(path: Path) -> None:
        if path.is_file():
            found.append(str(path.relative_to(tmp_path)))

    excludes = plan(*BATCH, root=tmp_path).runtime_env["excludes"]
    _dir_travel(tmp_path, [_get_excludes(tmp_path, excludes)], visit, include_gitignore=True)
    assert sorted(found) == sorted(ours)


@pytest.mark.parametrize(
    ("words", "env", "message"),
    [
        ((), None, "submit is given nothing to run; pass one of serve, batch, generate"),
        (("btach", "-i", "/x"), None, "submit is given 'btach' to run"),
        (("batch", "-i", "in.jsonl", "-o", "/o"), None, "-i in.jsonl is relative"),
        (("batch", "-i", "/in.jsonl", "--output=o"), None, "--output o is relative"),
        (("batch", "-i", "-", "-o", "/o"), None, "-i - is stdin"),
        (("serve", "--model", "model"), None, "--model model is relative"),
        (BATCH, "{", "no JSON"),
        (BATCH, '{"working_dir": "."}', "without working_dir"),
        (BATCH, "[]", "it must be an object"),
    ],
)
def test_what_cannot_work_is_refused_here(words: tuple[str, ...], env: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(*words, runtime_env_json=env)


def test_urls_and_stdout_are_no_relative_paths() -> None:
    plan("batch", "-i", "s3://bucket/in.jsonl", "-o", "-")


LOG = "".join(f"line {i} é\n" for i in range(100))


@dataclass
class Client:
    """A job that writes LOG and ends; its connections break after so many characters of their own."""

    connections: list[int | None]
    status: JobStatus = JobStatus.SUCCEEDED
    exit_code: int | None = 0
    reachable: bool = True
    tailed: int = 0
    asked: list[str] = field(default_factory=list)

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        if not self.reachable:
            raise ConnectionError("refused")
        self.tailed += 1
        breaks_after = self.connections.pop(0)
        text = LOG if breaks_after is None else LOG[:breaks_after]
        for start in range(0, len(text), 37):
            yield text[start : start + 37]
        if breaks_after is not None:
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")

    def get_job_info(self, job_id: str) -> Any:
        if not self.reachable:
            raise ConnectionError("refused")
        status = self.status if not self.connections else JobStatus.RUNNING
        return SimpleNamespace(status=status, driver_exit_code=self.exit_code, message="why")

    def get_job_logs(self, job_id: str) -> str:
        return LOG


def run_follow(client: Any, clock: list[float] | None = None) -> tuple[str, JobEnd]:
    written: list[str] = []
    now = clock or [0.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    end = asyncio.run(follow(client, "job", written.append, sleep=sleep, clock=lambda: now[0]))
    return "".join(written), end


@pytest.mark.parametrize("connections", [[None], [10, None], [500, 40, 0, 501, None], [300, 600]])
def test_each_character_of_the_log_is_shown_once(connections: list[int | None]) -> None:
    client = Client(list(connections))
    assert run_follow(client) == (LOG, JobEnd(status="SUCCEEDED", exit_code=0, message="why"))
    assert client.tailed == len(connections)


@pytest.mark.parametrize(
    ("status", "exit_code", "expected"),
    [
        (JobStatus.SUCCEEDED, None, 0),
        (JobStatus.FAILED, 3, 3),
        (JobStatus.FAILED, -9, 137),
        (JobStatus.FAILED, None, 4),
        (JobStatus.STOPPED, None, 143),
    ],
)
def test_the_exit_code_is_the_jobs(status: JobStatus, exit_code: int | None, expected: int) -> None:
    _, end = run_follow(Client([None], status=status, exit_code=exit_code))
    assert end.exit_code == expected


def test_a_cluster_that_stays_away_is_given_up() -> None:
    clock = [0.0]
    with pytest.raises(UnavailableError, match=r"out of reach for 600 s \(refused\).*ray job status job"):
        run_follow(Client([None], reachable=False), clock)
    assert PATIENCE_S < clock[0] < 2 * PATIENCE_S


def test_a_cluster_that_takes_no_jobs_yet_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.submit.time.sleep", lambda seconds: None)
    refusals = [
        "Request failed with status code 500: No available agent to submit job, please try again later."
    ]
    refusals += refusals

    def submit_job(**wanted: Any) -> str:
        if refusals:
            raise RuntimeError(refusals.pop())
        return f"job of {wanted['entrypoint']}"

    client: Any = SimpleNamespace(submit_job=submit_job)
    submission = plan(*BATCH)
    assert _submitted(client, submission, None) == f"job of {submission.entrypoint}"
    refusals.append("Request failed with status code 500: it is full")
    with pytest.raises(UnavailableError, match=r"has not taken the job: .* it is full"):
        _submitted(client, submission, None)


FOLLOWING = """
import asyncio, sys
from types import SimpleNamespace
from cluster.cli import main, submit
from cluster.jobs import follow

async def endless(*_):
    print("following", flush=True)
    await asyncio.sleep(600)

follow.follow = endless
submit._client = lambda _: SimpleNamespace(submit_job=lambda **_: "job-1")
sys.argv[1:] = ["submit", "--address", "http://127.0.0.1:1", "--", "batch", "-i", "/in", "-o", "/out"]
main()
"""


@pytest.mark.slow
@pytest.mark.product(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_following_and_says_that_the_job_goes_on(number: signal.Signals) -> None:
    following = subprocess.Popen(
        [sys.executable, "-c", FOLLOWING],
        env=environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert following.stdout is not None
        assert following.stdout.readline() == "following\n"
        following.send_signal(number)
        _, errors = following.communicate(timeout=60)
    finally:
        following.kill()
    assert following.returncode == 128 + number, errors
    assert "job job-1 goes on" in errors
    assert "Traceback" not in errors
