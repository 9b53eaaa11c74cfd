"""`latentray status`: what a server says of itself."""

import dataclasses
import json
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from actors.stats import GroupStats
from cluster.cli.group_figures import figures
from cluster.cli.server_flags import with_credentials
from cluster.cli.tables import print_table
from cluster.client.credentials import Credentials
from cluster.errors import EXIT_UNAVAILABLE
from kernels_integration.errors import UnavailableError

ServerFlag = Annotated[
    str,
    typer.Option(
        "--server", metavar="HOST:PORT", envvar="LATENTRAY_SERVER", help="gRPC address of a running server."
    ),
]


RayFlag = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="RAY",
        help="Ray cluster that a detached deployment runs on, such as auto; instead of --server.",
        show_default=False,
    ),
]
NameFlag = Annotated[
    str | None,
    typer.Option(
        "--name",
        metavar="NAME",
        help="With --address: of the deployment [default: the only one]",
        show_default=False,
    ),
]


@with_credentials
def status(
    credentials: Credentials,
    server: ServerFlag = "127.0.0.1:50051",
    address: RayFlag = None,
    name: NameFlag = None,
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="OUTPUT",
            help="Tell of the batch that makes this output (or has this journal), instead of a server.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch",
            metavar="SECONDS",
            min=0.1,
            help="Go on, and tell every so often of the time since then. Ctrl-C ends it.",
        ),
    ] = None,
) -> None:
    """Ask a running server for its health, model and load. Exit code 4 when it cannot serve."""
    if batch is not None:
        _tell_of_batch(batch, as_json=as_json, watch=watch)
        return
    if address is not None:
        server = _server_of(address, name)
    from cluster.client import Client

    with Client(server, timeout_s=5.0, credentials=credentials) as client:
        health = client.health()
        loads = client.loads()
        answer: dict[str, Any] = {
            "server": server,
            "health": dataclasses.asdict(health),
            "model": dataclasses.asdict(client.model_info()),
            "engine": dataclasses.asdict(client.server_info()),
            "groups": [msgspec.to_builtins(load) for load in loads],
        }
        if as_json:
            typer.echo(json.dumps(answer, indent=None if watch else 2))
        else:
            typer.echo(f"{server}: {_health_text(health.healthy, health.message)}")
            for part in ("model", "engine"):
                facts = answer[part].items()
                print_table((part, ""), sorted(fact for fact in facts if fact[0] != "actors_by_node"))
            if nodes := answer["engine"]["actors_by_node"]:
                print_table(("node", "runs"), list(nodes.items()))
            for number, (load, shown) in enumerate(zip(loads, answer["groups"], strict=True)):
                rows = [(name, value) for name, value in shown.items() if name != "stats"]
                print_table((f"group {number}", ""), rows + (figures(load.stats) if load.stats else []))
        if watch is not None:
            _watch(client, watch, [load.stats for load in loads], as_json=as_json)
    if not health.healthy:
        raise typer.Exit(EXIT_UNAVAILABLE)


def _server_of(address: str, name: str | None) -> str:
    """Where a deployment listens. Errors: ConfigError, UnavailableError, also when it does not serve."""
    from cluster.launch import detached
    from cluster.launch.ray_session import RaySession

    with closing(RaySession(address)):
        found = detached.describe(detached.find(name)[1])
    if not found.server:
        raise UnavailableError(f"{found.name} does not listen yet: {found.state}")
    return found.server


def _tell_of_batch(name: str, *, as_json: bool, watch: float | None) -> None:
    """With `watch` until it is over."""
    from cluster.batch.progress import read_progress
    from cluster.report.progress import duration

    beside = Path(os.path.realpath(name) + ".journal")
    path = beside if beside.exists() or not os.path.exists(name) else Path(name)
    while True:
        progress = read_progress(path)
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(progress)))
        else:
            of = "" if progress.num_rows is None else f" of {progress.num_rows}"
            rows = [
                ("state", progress.state),
                ("rows", f"{progress.num_done}{of}, {progress.num_failed} failed"),
                ("run", str(progress.run)),
            ]
            if progress.rows_per_s is not None:
                rows.append(("rows/s", f"{progress.rows_per_s:.1f}"))
            if progress.left_s is not None:
                rows.append(("left", duration(progress.left_s)))
            print_table((f"batch {name}", ""), rows)
        if watch is None or progress.state != "running":
            return
        time.sleep(watch)


def _watch(client: Any, seconds: float, before: list[GroupStats | None], *, as_json: bool) -> None:
    """One block, or one JSON line, each time."""
    while True:
        time.sleep(seconds)
        health, loads = client.health(), client.loads()
        if as_json:
            groups = [msgspec.to_builtins(load) for load in loads]
            typer.echo(json.dumps({"health": dataclasses.asdict(health), "groups": groups}))
        else:
            told = _health_text(health.healthy, health.message)
            typer.echo(f"\n{time.strftime('%H:%M:%S')} {told}; the last {seconds:g} s:")
            for number, load in enumerate(loads):
                rows = [("tokens/s", f"{load.tokens_per_s:.0f}")]
                rows += figures(load.stats, before[number]) if load.stats else []
                print_table((f"group {number}", ""), rows)
        before = [load.stats for load in loads]


def _health_text(healthy: bool, message: str) -> str:
    """A server that serves tells of the groups that do not."""
    if not healthy:
        return f"not serving: {message}"
    return "serving" if message in ("", "ready") else f"serving; {message}"
