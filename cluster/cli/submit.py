"""`latentray submit`: a command of latentray's as a job of a Ray cluster."""

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from kernels_integration.errors import UnavailableError

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

    from cluster.jobs.submission import Submission

_PATIENCE_S = 60.0
_AGAIN_S = 1.0
_NOT_YET = "No available agent to submit job"
"""Ray's words."""


def submit(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- COMMAND ...", help="What to run, such as: -- batch -i /data/in.jsonl ..."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="URL",
            help="Ray's dashboard, such as http://head:8265 [default: RAY_API_SERVER_ADDRESS, RAY_ADDRESS, "
            "else the cluster on this machine]",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        str,
        typer.Option("--python", metavar="PATH", help="Of the nodes; it must have latentray's dependencies."),
    ] = "python",
    submission_id: Annotated[
        str | None,
        typer.Option("--submission-id", metavar="ID", help="Name of the job.", show_default=False),
    ] = None,
    runtime_env_json: Annotated[
        str | None,
        typer.Option(
            "--runtime-env-json",
            metavar="JSON",
            help='More of Ray\'s runtime_env, such as {"env_vars": {"A": "1"}}.',
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Show the job's log until its end, and end with its exit code."
        ),
    ] = True,
) -> None:
    """Run a command as a job of a Ray cluster (Ray Jobs API).

    It brings latentray's packages, nothing else of the folder. Ctrl-C ends the following, not the job.
    Clusters with token authentication are reached by Ray's own RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or
    RAY_AUTH_TOKEN_PATH.
    """
    from cluster.jobs.follow import follow
    from cluster.jobs.submission import package_folder, plan_submission

    assert context.parent is not None
    group = context.parent.command
    commands = [name for name in group.list_commands(context) if name != "submit"]  # type: ignore[attr-defined]
    submission = plan_submission(
        words or [],
        commands=commands,
        python=python,
        root=package_folder(),
        runtime_env_json=runtime_env_json,
    )
    with _address_wins(address):
        client = _client(address)
        job_id = _submitted(client, submission, submission_id)
    _tell(f"job {job_id}; the same by Ray's own command:\n  {submission.as_command(address)}")
    if not wait:
        return
    try:
        end = asyncio.run(follow(client, job_id, _write))
    except BaseException:
        _tell(f"job {job_id} goes on: ray job logs --follow {job_id}, ray job stop {job_id}")
        raise
    if end.exit_code:
        _tell(f"job {job_id} has {end.status.lower()}: {end.message}")
    raise typer.Exit(end.exit_code)


def _client(address: str | None) -> "JobSubmissionClient":
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UnavailableError(
            f"no Ray dashboard answers at {address or 'the default address'}: {error}; pass --address "
            "http://HEAD:8265, of a cluster with ray[default]"
        ) from error


def _submitted(client: "JobSubmissionClient", submission: "Submission", submission_id: str | None) -> str:
    """A cluster that has just started may have no process yet that takes jobs: then again."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            job_id: str = client.submit_job(
                entrypoint=submission.entrypoint,
                runtime_env=dict(submission.runtime_env),
                submission_id=submission_id,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            if _NOT_YET not in str(error) or time.monotonic() >= deadline_s:
                raise UnavailableError(f"the cluster has not taken the job: {error}") from error
            _tell("waiting for the cluster to take jobs")
            time.sleep(_AGAIN_S)
        else:
            return job_id


@contextlib.contextmanager
def _address_wins(address: str | None) -> Iterator[None]:
    """Ray would take its variables instead of what the user has just said."""
    names = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS") if address is not None else ()
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell(message: str) -> None:
    print(f"latentray: {message}", file=sys.stderr, flush=True)
