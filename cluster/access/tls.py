"""Certificates of a server: read, checked, and read again when their files change."""

import logging
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from cluster.access.secret_file import MAX_BYTES, open_at_once, read_secret, version_of
from kernels_integration.errors import ConfigError

logger = logging.getLogger(__name__)

CERT_FLAG, KEY_FLAG, CLIENT_CA_FLAG = "--tls-cert", "--tls-key", "--tls-client-ca"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files. client_ca: what signs certificates of clients; None: clients need none."""

    cert: str
    key: str
    client_ca: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    cert: bytes
    key: bytes
    client_ca: bytes | None


class ServerTls:
    """What gRPC and HTTP shake hands with. `reload` is called every second or so, from any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Errors: ConfigError: a file, its certificates' dates, or a key of another certificate."""
        self._files = files
        self._version = self._version_now()
        self._content = _read(files)
        self._current = self._new_context()
        self.context = self._new_context()
        """Of HTTP. Every handshake is handed over to the context of the newest files."""
        self.context.sni_callback = self._hand_over

    def _new_context(self) -> ssl.SSLContext:
        """Errors: ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # A ticket would let a client in without its certificate being looked at again.
        context.num_tickets = 0
        context.options |= ssl.OP_NO_TICKET
        try:
            # From the files, as ssl does not take bytes; they were found good a moment ago.
            context.load_cert_chain(self._files.cert, self._files.key)
            if self._content.client_ca is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(cadata=self._content.client_ca.decode())
        except (ValueError, OSError) as error:  # ssl's errors are both
            raise ConfigError(f"{CERT_FLAG} {self._files.cert} cannot be used: {error}") from error
        return context

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Every handshake asks anew, so connections go on while certificates change."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(),
            self._grpc_configuration,
            require_client_authentication=self._files.client_ca is not None,
        )

    def reload(self) -> None:
        """Read the files if they have changed. What cannot be used is logged, and the old ones hold: the
        parts of a pair may be written one after the other.
        """
        version = self._version_now()
        if version == self._version:
            return
        self._version = version
        try:
            self._content = _read(self._files)
            self._current = self._new_context()
        except ConfigError as error:
            logger.error("the certificates from before stay in force: %s", error)
            return
        logger.info("new certificates are in force")

    def _version_now(self) -> tuple[object, ...]:
        return version_of(self._files.cert, self._files.key, self._files.client_ca)

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        content = self._content
        return grpc.ssl_server_certificate_configuration(
            [(content.key, content.cert)], root_certificates=content.client_ca
        )


def _read(files: TlsFiles) -> _Content:
    key = read_secret(files.key, KEY_FLAG)
    cert, certificates = read_certificates(files.cert, CERT_FLAG)
    if _public_bytes(certificates[0].public_key()) != _public_bytes(
        _private_key(key, files.key).public_key()
    ):
        raise ConfigError(
            f"{KEY_FLAG} {files.key} is not the key of the first certificate of {CERT_FLAG} {files.cert}, "
            f"{certificates[0].subject.rfc4514_string()}; pass the two that belong together"
        )
    client_ca = None if files.client_ca is None else read_certificates(files.client_ca, CLIENT_CA_FLAG)[0]
    return _Content(cert=cert, key=key, client_ca=client_ca)


def read_certificates(path: str, flag: str) -> tuple[bytes, Sequence[x509.Certificate]]:
    """A PEM file, and the certificates in it, all of them in force now. Errors: ConfigError."""
    try:
        with open_at_once(path) as file:
            data = file.read(MAX_BYTES)
        certificates = x509.load_pem_x509_certificates(data)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(
            f"{flag} {path} holds no certificates that can be read ({error}); it must be a PEM file with "
            "-----BEGIN CERTIFICATE-----"
        ) from error
    now = datetime.now(UTC)
    for certificate in certificates:
        subject = certificate.subject.rfc4514_string()
        begins, ends = (
            f"{at:%Y-%m-%d %H:%M} UTC"
            for at in (certificate.not_valid_before_utc, certificate.not_valid_after_utc)
        )
        if now > certificate.not_valid_after_utc:
            raise ConfigError(f"{flag} {path}: the certificate of {subject} ended {ends}; renew it")
        if now < certificate.not_valid_before_utc:
            raise ConfigError(
                f"{flag} {path}: the certificate of {subject} begins {begins}; check the clock, or wait"
            )
    return data, certificates


def _private_key(data: bytes, path: str) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:  # TypeError: it has a passphrase
        raise ConfigError(
            f"{KEY_FLAG} {path} holds no private key that can be read ({error}); it must be a PEM file with "
            "a key without a passphrase"
        ) from error


def _public_bytes(key: object) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined,no-any-return]
