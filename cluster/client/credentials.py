"""What a client shows a server, and what it wants to see: API key and certificates."""

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kernels_integration.errors import ConfigError

Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """tls: speak TLS, also where nothing else says so. tls_ca: PEM file of what signed the server's
    certificate; None: what this machine trusts. tls_cert, tls_key: PEM files of a client's own certificate.
    """

    api_key: str | None = field(default=None, repr=False)
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key belong together: give both, or none")
        key = self.api_key
        if key is not None and not (key and key.isascii() and key.isprintable() and key == key.strip()):
            raise ConfigError("the API key is empty or has characters that no key has; pass printable ASCII")

    @property
    def metadata(self) -> Metadata:
        """Of each call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def of_channel(self) -> grpc.ChannelCredentials | None:
        """None: without TLS. Errors: ConfigError for a file that cannot be read."""
        if not (self.tls or self.tls_ca or self.tls_cert):
            return None
        ca, key, cert = (
            None if path is None else _read(flag, path)
            for flag, path in (
                ("--tls-ca", self.tls_ca),
                ("--tls-key", self.tls_key),
                ("--tls-cert", self.tls_cert),
            )
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


def _read(flag: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
