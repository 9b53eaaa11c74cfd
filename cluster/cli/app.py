"""The commands, and what becomes of their errors.

A user's mistake gives a message on stderr and an exit code, never a traceback.
"""

import errno
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from cluster import __version__
from cluster.cli import (
    batch,
    bench,
    config,
    demo,
    doctor,
    generate,
    inspect,
    operate,
    serve,
    status,
    submit,
)
from cluster.cli.sections import SectionedCommand, SectionedGroup
from cluster.errors import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_UNAVAILABLE, outcome
from cluster.launch.signals import unwind_on_signals
from kernels_integration.errors import LatentrayError

app = typer.Typer(
    name="latentray",
    cls=SectionedGroup,
    help="Serve MLA models with sparse attention and multi-token prediction on a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", cls=SectionedCommand)(demo.demo)
app.command("serve", cls=SectionedCommand)(serve.serve)
app.command("generate", cls=SectionedCommand)(generate.generate)
app.command("batch", cls=SectionedCommand)(batch.batch)
app.command("submit", cls=SectionedCommand)(submit.submit)
app.command("bench", cls=SectionedCommand)(bench.bench)
app.command("status", cls=SectionedCommand)(status.status)
app.command("drain", cls=SectionedCommand)(operate.drain)
app.command("undrain", cls=SectionedCommand)(operate.undrain)
app.command("restart", cls=SectionedCommand)(operate.restart)
app.command("stop", cls=SectionedCommand)(operate.stop)
app.command("inspect", cls=SectionedCommand)(inspect.inspect)
app.command("doctor", cls=SectionedCommand)(doctor.doctor)
app.add_typer(config.app, name="config")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command("version")
def _version() -> None:
    """Print the version."""
    typer.echo(__version__)


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk says to the command's own output; files that flags name have messages of their own."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with one of cluster.errors.EXIT_CODES."""
    received = unwind_on_signals()
    try:
        app(args=argv, prog_name="latentray")
    except LatentrayError as error:
        print(f"latentray: {error}", file=sys.stderr)
        sys.exit(outcome(error).exit_code)
    except SystemExit as ended:
        if received:
            sys.exit(128 + received[0])
        if ended.code == 1:  # typer's for a pipe that its reader has closed
            sys.exit(EXIT_UNAVAILABLE)
        raise
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except Exception as error:
        if received:
            sys.exit(128 + received[0])
        if isinstance(error, OSError) and error.errno in _FULL:
            print(f"latentray: the output takes no more: {error.strerror}", file=sys.stderr)
            sys.exit(EXIT_UNAVAILABLE)
        traceback.print_exc()
        print("latentray: internal error; please report it with the lines above", file=sys.stderr)
        sys.exit(EXIT_INTERNAL)
