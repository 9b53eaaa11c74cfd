"""`latentray drain`, `undrain`, `restart`: orders to a running server; `stop`: a detached one's end."""

import os
from contextlib import closing
from typing import Annotated

import typer

from cluster.cli.progress_line import ProgressLine
from cluster.cli.server_flags import with_credentials
from cluster.cli.status import NameFlag, RayFlag, ServerFlag
from cluster.client.credentials import Credentials
from cluster.control.command import Command
from kernels_integration.errors import ConfigError

_WhereArgument = Annotated[
    str, typer.Argument(metavar="GROUP|NODE", help="Number of a group, or address of a node.")
]


@with_credentials
def drain(
    credentials: Credentials,
    where: _WhereArgument,
    server: ServerFlag = "127.0.0.1:50051",
    address: RayFlag = None,
    name: NameFlag = None,
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            metavar="SECONDS",
            min=0,
            help="How long requests may go on that no other group can take over.",
        ),
    ] = 30.0,
) -> None:
    """Empty a group, or the groups of a node: no new requests, and its own go on at other groups.

    Returns when nothing runs there. Its processes stay: `undrain` lets it serve again.
    """
    _carry_out(server, address, name, credentials, Command(do="drain", where=where, drain_s=drain_timeout))


@with_credentials
def undrain(
    credentials: Credentials,
    where: _WhereArgument,
    server: ServerFlag = "127.0.0.1:50051",
    address: RayFlag = None,
    name: NameFlag = None,
) -> None:
    """Let a drained group, or those of a node, serve again."""
    _carry_out(server, address, name, credentials, Command(do="undrain", where=where))


@with_credentials
def restart(
    credentials: Credentials,
    where: Annotated[
        str | None,
        typer.Argument(
            metavar="[GROUP|NODE]", help="Number of a group, or address of a node.", show_default=False
        ),
    ] = None,
    server: ServerFlag = "127.0.0.1:50051",
    address: RayFlag = None,
    name: NameFlag = None,
    rolling: Annotated[
        bool, typer.Option("--rolling", help="All groups, one after the other.", show_default=False)
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Checkpoint to serve from then on, of the same kind and tokenizer "
            "[default: the one that is served]",
            show_default=False,
        ),
    ] = None,
    drain_timeout: Annotated[
        float | None,
        typer.Option(
            "--drain-timeout",
            metavar="SECONDS",
            min=0,
            help="How long requests may go on that no other group can take over [default: to their end]",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Start groups again, one after the other, while the others serve: no request fails.

    With --model their weights are replaced; a stream ends with those that it began with.
    """
    if rolling == (where is not None):
        raise ConfigError("restart takes a group or node, or --rolling for all groups; give one of them")
    path = None if model is None else os.path.abspath(os.path.expanduser(model))
    _carry_out(
        server,
        address,
        name,
        credentials,
        Command(do="restart", where=where, drain_s=drain_timeout, model=path),
    )


def stop(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Of the deployment; the only one, else.", show_default=False),
    ] = None,
    address: Annotated[
        str,
        typer.Option("--address", metavar="RAY", envvar="RAY_ADDRESS", help="Ray cluster that it runs on."),
    ] = "auto",
    drain_timeout: Annotated[
        float,
        typer.Option(
            "--drain-timeout", metavar="SECONDS", min=0, help="How long live requests may still go on."
        ),
    ] = 30.0,
) -> None:
    """End what `latentray serve --detach` has started: live requests first, then all of its processes."""
    from cluster.launch import detached
    from cluster.launch.ray_session import RaySession

    with closing(RaySession(address)), closing(ProgressLine()) as progress:
        found, actor = detached.find(name)
        detached.stop(actor, found, drain_timeout, progress)
    typer.echo(f"latentray: {found} has ended")


def _carry_out(
    server: str, address: str | None, name: str | None, credentials: Credentials, command: Command
) -> None:
    if address is None:
        from cluster.control.client import carry_out

        for text in carry_out(server, command, credentials):
            typer.echo(text)
        return
    from cluster.launch import detached
    from cluster.launch.ray_session import RaySession

    with closing(RaySession(address)):
        for text in detached.carry_out(detached.find(name)[1], command):
            typer.echo(text)
