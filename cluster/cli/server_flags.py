"""Flags of commands that ask a running server: how to show who asks."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from cluster.client.credentials import Credentials

_PANEL = "Access to the server"


def _file(flag: str, words: str) -> Any:
    return Annotated[
        str | None,
        typer.Option(flag, metavar="FILE", help=words, show_default=False, rich_help_panel=_PANEL),
    ]


_FLAGS: dict[str, tuple[Any, Any]] = {
    "api_key": (
        Annotated[
            str | None,
            typer.Option(
                "--api-key",
                metavar="KEY",
                envvar="LATENTRAY_API_KEY",
                help="Key that the server asks for; other users of this machine see it among the processes: "
                "prefer LATENTRAY_API_KEY.",
                show_default=False,
                rich_help_panel=_PANEL,
            ),
        ],
        None,
    ),
    "tls": (
        Annotated[
            bool,
            typer.Option(
                "--tls",
                help="Speak TLS with a server whose certificate this machine trusts.",
                show_default=False,
                rich_help_panel=_PANEL,
            ),
        ],
        False,
    ),
    "tls_ca": (_file("--tls-ca", "Speak TLS; PEM file of what signed the server's certificate."), None),
    "tls_cert": (_file("--tls-cert", "PEM file of this client's certificate."), None),
    "tls_key": (_file("--tls-key", "PEM file of its key."), None),
}
"""Fields of Credentials: annotation and default."""


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command whose parameter `credentials` is what its user gave. Errors: ConfigError."""

    def run(**values: Any) -> None:
        given = {name: values.pop(name) for name in _FLAGS}
        command(credentials=Credentials(**given), **values)

    signature = inspect.signature(command)
    own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "credentials"]
    flags = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _FLAGS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run
