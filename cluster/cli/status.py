"""`latentray status`: what a server says of itself."""

import dataclasses
import json
from typing import Annotated, Any

import typer

from cluster.cli.tables import print_table
from cluster.errors import EXIT_UNAVAILABLE

ServerFlag = Annotated[
    str,
    typer.Option(
        "--server", metavar="HOST:PORT", envvar="LATENTRAY_SERVER", help="gRPC address of a running server."
    ),
]


def status(
    server: ServerFlag = "127.0.0.1:50051",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask a running server for its health, model and load. Exit code 4 when it cannot serve."""
    from cluster.client import Client

    with Client(server, timeout_s=5.0) as client:
        health = client.health()
        answer: dict[str, Any] = {
            "server": server,
            "health": dataclasses.asdict(health),
            "model": dataclasses.asdict(client.model_info()),
            "engine": dataclasses.asdict(client.server_info()),
            "groups": [dataclasses.asdict(load) for load in client.loads()],
        }
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        typer.echo(f"{server}: {'serving' if health.healthy else 'not serving: ' + health.message}")
        for part in ("model", "engine"):
            print_table((part, ""), sorted(answer[part].items()))
        for number, load in enumerate(answer["groups"]):
            print_table((f"group {number}", ""), list(load.items()))
    if not health.healthy:
        raise typer.Exit(EXIT_UNAVAILABLE)
