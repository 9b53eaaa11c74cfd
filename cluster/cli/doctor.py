"""`latentray doctor`: can this machine serve this configuration?"""

import dataclasses
import json
from typing import Annotated

import typer

from cluster.cli.engine_flags import with_settings
from cluster.config import ServeArgs, Settings
from cluster.errors import EXIT_UNAVAILABLE

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@with_settings(ServeArgs)
def doctor(
    settings: Settings[ServeArgs],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check Python, packages, checkpoint, memory, port and Ray for the given flags.

    Exit code 4 when a check fails.
    """
    from cluster.report.doctor import run_checks

    checks = []
    for check in run_checks(settings.args):
        checks.append(check)
        if not as_json:
            typer.echo(f"{_MARKS[check.status]}  {check.name}: {check.detail}")
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(EXIT_UNAVAILABLE)
