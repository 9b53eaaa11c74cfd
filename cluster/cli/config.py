"""`latentray config`: what is in force, and what may be set."""

import json
from typing import Annotated

import typer

from cluster.cli.engine_flags import with_settings
from cluster.cli.sections import SectionedCommand, SectionedGroup
from cluster.cli.tables import print_table
from cluster.config import ServeArgs, Settings
from cluster.config.resolve import resolve
from cluster.config.setting import declared
from cluster.config.show import effective_settings

app = typer.Typer(
    help="Show the settings that are in force, or the schema of a config file.", cls=SectionedGroup
)


@app.command("show", cls=SectionedCommand)
@with_settings(ServeArgs)
def show(
    settings: Settings[ServeArgs],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print every setting's final value and where it came from."""
    shown = effective_settings(settings, resolve(settings.args))
    if as_json:
        content = {s.name: {"value": s.value, "origin": s.origin} for s in shown}
        typer.echo(json.dumps(content, indent=2))
    else:
        defaults = {name: setting.default for name, setting in declared(ServeArgs).items()}
        print_table(
            ("setting", "value", "from"),
            [(s.name, defaults[s.name] if s.value is None else s.value, s.origin) for s in shown],
        )


@app.command("schema", cls=SectionedCommand)
def schema() -> None:
    """Print the JSON schema of a config file."""
    typer.echo(json.dumps(ServeArgs.model_json_schema(), indent=2))
