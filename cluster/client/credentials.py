"""What a client shows a server, and what it wants to see: API key and certificates."""

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kernels_integration.errors import ConfigError

CHANNEL_OPTIONS = (
    # The server decides what is too large, and says by which flag.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
)
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
    def speaks_tls(self) -> bool:
        return bool(self.tls or self.tls_ca or self.tls_cert)

    @property
    def metadata(self) -> Metadata:
        """Of each call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    def channel(self, target: str) -> grpc.Channel:
        """A blocking one. Errors: ConfigError for a file that cannot be read."""
        tls = self.of_channel()
        if tls is None:
            return grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(target, tls, options=CHANNEL_OPTIONS)

    def aio_channel(self, target: str) -> grpc.aio.Channel:
        """Of the running event loop. Errors: as `channel`."""
        tls = self.of_channel()
        if tls is None:
            return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(target, tls, options=CHANNEL_OPTIONS)

    def of_channel(self) -> grpc.ChannelCredentials | None:
        """None: without TLS. Errors: ConfigError for a file that cannot be read."""
        if not self.speaks_tls:
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
