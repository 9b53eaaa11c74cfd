"""Help in sections: options under the headings of their declarations, commands with their whole summary.

Contexts and formatters are those of typer's click, which is a part of typer or a package, by its version.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

from kernels_integration.errors import ConfigError, shown


class SectionedCommand(TyperCommand):
    """Its options are listed by rich_help_panel, those without one first; arguments before them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Errors: ConfigError for an argument too many, which is mostly a model."""
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            hint = f"; a model is given as --model {ctx.args[0]}" if "model" in ctx.params else ""
            raise ConfigError(f"{self.name} takes no argument {shown(ctx.args[0])}{hint}")
        return rest

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, TyperArgument):
                record = (str(param.metavar), record[1])  # typer adds Python's type
            if record is not None:
                sections.setdefault(_section_of(param), []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class SectionedGroup(TyperGroup):
    """Its commands are listed with the first paragraph of their help, however long."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._summaries(ctx)))

    def _summaries(self, ctx: Any) -> Iterator[tuple[str, str]]:
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                text = inspect.cleandoc(command.help or "")
                yield name, " ".join(text.partition("\n\n")[0].split())


def _section_of(param: object) -> str:
    if isinstance(param, TyperArgument):
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or "Options"
