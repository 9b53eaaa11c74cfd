"""Help in sections: options under the headings of their declarations, commands with their whole summary.

Contexts and formatters are those of typer's click, which is a part of typer or a package, by its version.
"""

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

from cluster.config.other_engines import refuse_foreign
from kernels_integration.errors import ConfigError, shown


class SectionedCommand(TyperCommand):
    """Its options are listed by rich_help_panel, those without one first; arguments before them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Errors: ConfigError for an argument too many, which is mostly a model, and for flags that other
        engines or other commands have.
        """
        if not ctx.resilient_parsing:
            self._refuse_flags_of_others(ctx, args)
        ctx.allow_extra_args = True
        rest = super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            hint = f"; a model is given as --model {ctx.args[0]}" if "model" in ctx.params else ""
            raise ConfigError(f"{self.name} takes no argument {shown(ctx.args[0])}{hint}")
        return rest

    def _refuse_flags_of_others(self, ctx: Any, args: list[str]) -> None:
        own = _flags_of(self, ctx)
        is_value = False
        for word in itertools.takewhile(lambda word: word != "--", args):
            flag, _, value = word.partition("=")
            if is_value or flag in own:
                is_value = not is_value and own.get(word, False)
            elif re.fullmatch(r"-[a-z]|--?[a-z][-\w]+", flag):
                refuse_foreign(flag.lstrip("-").replace("-", "_"))
                if flag.startswith("--") and (others := _commands_with(flag, ctx)):
                    raise ConfigError(f"{self.name} takes no {flag}{_instead(self, flag, value, others)}")

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


def _flags_of(command: Any, ctx: Any) -> dict[str, bool]:
    """Each flag of a command, and whether a value follows it."""
    options = (param for param in command.get_params(ctx) if not isinstance(param, TyperArgument))
    return {
        flag: not (option.is_flag or option.count)
        for option in options
        for flag in (*option.opts, *option.secondary_opts)
    }


def _commands_with(flag: str, ctx: Any) -> list[str]:
    group = ctx.parent and ctx.parent.command
    if not isinstance(group, TyperGroup):
        return []
    commands = group.commands.items()
    return [name for name, command in commands if flag in _flags_of(command, ctx)]


def _instead(command: Any, flag: str, value: str, others: list[str]) -> str:
    argument = next((param for param in command.params if isinstance(param, TyperArgument)), None)
    if flag == "--model" and argument is not None and argument.metavar == "PATH":
        return f"; the directory is its argument: {command.name} {value or 'PATH'}"
    return f"; it is a flag of {', '.join(others)}"
