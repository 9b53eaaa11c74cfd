"""Command-line flags out of the settings' declarations."""

import inspect
from collections.abc import Callable, Collection
from typing import Annotated, Any

import typer

from cluster.config import EngineArgs, load_settings
from cluster.config.setting import Declared, declared

_CONFIG_FLAG = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="YAML file of settings, one a line, such as tensor-parallel-size: 2 "
        "[default: LATENTRAY_CONFIG, else none]",
        show_default=False,
    ),
]


def with_settings(
    cls: type[EngineArgs], *, only: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command whose parameter `settings` is a Settings[cls]: it gets a flag for each field.

    only: the fields that the command looks at, where it does not look at all.
    Flags hold text: the settings parse all sources alike, so that each gives the same message.
    """
    settings = {name: setting for name, setting in declared(cls).items() if not only or name in only}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            given = {name: values.pop(name) for name in settings}
            config_file = values.pop("config_file")
            command(settings=load_settings(cls, given, spelling="flag", config_file=config_file), **values)

        signature = inspect.signature(command)
        own = [p for p in signature.parameters.values() if p.name != "settings"]
        flags = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[(bool if setting.is_switch else str) | None, _option(setting)],
            )
            for name, setting in settings.items()
        ]
        config = inspect.Parameter(
            "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_CONFIG_FLAG
        )
        run.__signature__ = signature.replace(parameters=[*own, config, *flags])  # type: ignore[attr-defined]
        run.__name__ = command.__name__
        run.__doc__ = command.__doc__
        return run

    return decorate


def _option(setting: Declared) -> Any:
    names = [setting.flag] + ([setting.short] if setting.short else [])
    if setting.is_switch:
        names[0] += f"/--no-{setting.key}"
    return typer.Option(
        *names,
        metavar=None if setting.is_switch else setting.metavar,
        help=f"{setting.help} [default: {setting.default}]",
        show_default=False,
        rich_help_panel=setting.group,
    )
