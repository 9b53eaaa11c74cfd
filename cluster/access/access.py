"""What protects a gateway's ports, from files that may change while it serves."""

import asyncio
import logging
import os
from dataclasses import dataclass

from cluster.access.api_keys import RELOAD_S, ApiKeys
from cluster.access.tls import ServerTls, TlsFiles
from cluster.config import ServeArgs
from kernels_integration.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessFiles:
    """Paths, on the node of each gateway. None: without."""

    api_keys: str | None = None
    tls: TlsFiles | None = None

    @classmethod
    def of(cls, args: ServeArgs) -> "AccessFiles":
        """Errors: ConfigError for flags that belong together."""
        given = {
            "--tls-cert": args.tls_cert,
            "--tls-key": args.tls_key,
            "--tls-client-ca": args.tls_client_ca,
        }
        if args.tls_cert is None or args.tls_key is None:
            if any(given.values()):
                told = ", ".join(flag for flag, path in given.items() if path)
                raise ConfigError(f"{told} without --tls-cert and --tls-key; TLS needs both of these")
            return cls(api_keys=_absolute(args.api_keys))
        tls = TlsFiles(
            cert=os.path.abspath(args.tls_cert),
            key=os.path.abspath(args.tls_key),
            client_ca=_absolute(args.tls_client_ca),
        )
        return cls(api_keys=_absolute(args.api_keys), tls=tls)


def _absolute(path: str | None) -> str | None:
    """Gateways run in folders of their own."""
    return None if path is None else os.path.abspath(path)


class Access:
    """The files' content, as of their last good versions."""

    def __init__(self, files: AccessFiles) -> None:
        """Errors: ConfigError."""
        self.keys = None if files.api_keys is None else ApiKeys(files.api_keys)
        self.tls = None if files.tls is None else ServerTls(files.tls)

    async def follow(self) -> None:
        """Read changes of the files, until cancelled."""
        followed = [part for part in (self.keys, self.tls) if part is not None]
        while followed:
            await asyncio.sleep(RELOAD_S)
            for part in followed:
                try:
                    await asyncio.to_thread(part.reload)
                except Exception:  # what is in force stays, and the next change is looked at
                    logger.exception("files of keys and certificates could not be read")
