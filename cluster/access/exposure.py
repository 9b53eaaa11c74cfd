"""Which addresses are served: to other machines only with keys and certificates, or when it is said."""

import ipaddress
import socket

from cluster.config import ServeArgs
from kernels_integration.errors import ConfigError


def require_protected(args: ServeArgs) -> None:
    """Errors: ConfigError when others could ask without being known, or read what is asked and answered.

    An address that other machines reach needs TLS, and API keys or certificates of clients; --insecure leaves
    both to what stands in front. Where the host cannot be resolved, listening will say so.
    """
    if args.insecure or is_loopback(args.host):
        return
    lacking = []
    if args.tls_cert is None:
        lacking.append("TLS (--tls-cert and --tls-key)")
    if args.api_keys is None and args.tls_client_ca is None:
        lacking.append("API keys (--api-keys) or certificates of clients (--tls-client-ca)")
    if lacking:
        raise ConfigError(
            f"host {args.host} is reached by other machines, and there are no {' and no '.join(lacking)}; "
            "give them, serve 127.0.0.1, or pass --insecure where a proxy or a network policy guards it"
        )


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches it. A name counts when all of its addresses do."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
