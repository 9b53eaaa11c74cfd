"""Flags of sampling parameters, out of their declarations."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from actors.parameter_kinds import Switch, Texts
from actors.sampling_params import PARAMETERS, Parameter
from cluster.config.setting import flag_name

_PANEL = "Sampling (default: what the checkpoint recommends)"
_FLAGS = {name: row for name, row in PARAMETERS.items() if row.flag}


def with_sampling_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose parameter `sampling` is {name: value}: what its user gave, each one legal.

    Errors of the command: InvalidRequestError that names the flag.
    """

    def run(**values: Any) -> None:
        texts = {name: values.pop(name) for name in _FLAGS}
        given = {
            name: _FLAGS[name].parsed(text, flag=flag_name(name))
            for name, text in texts.items()
            if text is not None
        }
        command(sampling=given, **values)

    signature = inspect.signature(command)
    own = [p for p in signature.parameters.values() if p.name != "sampling"]
    flags = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[_flag_type(row) | None, _option(row)],
        )
        for name, row in _FLAGS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def _flag_type(row: Parameter) -> Any:
    if isinstance(row.kind, Switch):
        return bool
    return list[str] if isinstance(row.kind, Texts) else str


def _option(row: Parameter) -> Any:
    name = flag_name(row.name)
    if isinstance(row.kind, Switch):
        name += f"/--no-{name.removeprefix('--')}"
    rule = "" if isinstance(row.kind, Switch) else f" {row.kind.rule[0].upper()}{row.kind.rule[1:]}."
    again = " May be repeated." if isinstance(row.kind, Texts) else ""
    return typer.Option(
        *([name] if row.short is None else [name, row.short]),
        metavar=row.kind.metavar,
        help=f"{row.help}{rule}{again}",
        show_default=False,
        rich_help_panel=_PANEL,
    )
