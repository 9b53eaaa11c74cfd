"""Flags of commands that ask a running server: which, and how to show who asks."""

from typing import Annotated

import typer

from cluster.client.credentials import Credentials

ApiKeyFlag = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        envvar="LATENTRAY_API_KEY",
        help="Key that the server asks for; other users of this machine see it among the processes: prefer "
        "LATENTRAY_API_KEY.",
    ),
]
TlsFlag = Annotated[
    bool, typer.Option("--tls", help="Speak TLS with a server whose certificate this machine trusts.")
]
TlsCaFlag = Annotated[
    str | None,
    typer.Option(
        "--tls-ca", metavar="FILE", help="Speak TLS; PEM file of what signed the server's certificate."
    ),
]
TlsCertFlag = Annotated[
    str | None, typer.Option("--tls-cert", metavar="FILE", help="PEM file of this client's certificate.")
]
TlsKeyFlag = Annotated[str | None, typer.Option("--tls-key", metavar="FILE", help="PEM file of its key.")]


def credentials(
    api_key: str | None, tls: bool, tls_ca: str | None, tls_cert: str | None, tls_key: str | None
) -> Credentials:
    """Errors: ConfigError."""
    return Credentials(api_key=api_key, tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key)
