"""Command-line flags out of the settings' one definition."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from cluster.config import EngineArgs, load_settings
from cluster.config.sources import flag_name, setting_of

_CONFIG_FLAG = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="YAML file of settings, one a line, such as tensor-parallel-size: 2."
    ),
]


def with_settings(cls: type[EngineArgs]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose parameter `settings` is a Settings[cls]: it gets a flag for each field.

    Flags hold text: the settings parse all sources alike, so that each gives the same message.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            given = {field: values.pop(field) for field in cls.model_fields}
            config_file = values.pop("config_file")
            command(settings=load_settings(cls, given, spelling="flag", config_file=config_file), **values)

        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name != "settings"]
        flags = [
            inspect.Parameter(
                field,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[_flag_type(cls, field) | None, _option(cls, field)],
            )
            for field in cls.model_fields
        ]
        config = inspect.Parameter(
            "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG_FLAG
        )
        run.__signature__ = signature.replace(parameters=[*own, config, *flags])  # type: ignore[attr-defined]
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        return run

    return decorate


def _flag_type(cls: type[EngineArgs], field: str) -> type:
    """bool: a switch, --NAME or --no-NAME without a value."""
    return bool if cls.model_fields[field].annotation is bool else str


def _option(cls: type[EngineArgs], field: str) -> Any:
    setting, info = setting_of(cls, field), cls.model_fields[field]
    if _flag_type(cls, field) is bool:
        name, shown = flag_name(field), "on" if info.default else "off"
        return typer.Option(
            f"{name}/--no-{name.removeprefix('--')}",
            help=f"{info.description} [default: {shown}]",
            show_default=False,
            rich_help_panel=setting.group,
        )
    names = [flag_name(field)] + ([setting.short] if setting.short else [])
    default = setting.shown_default or info.default
    return typer.Option(
        *names,
        metavar=setting.metavar,
        help=f"{info.description} [default: {default}]",
        show_default=False,
        rich_help_panel=setting.group,
    )
