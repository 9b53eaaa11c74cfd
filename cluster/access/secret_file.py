"""Files that only their user may read."""

import os
import stat
from typing import BinaryIO

from kernels_integration.errors import ConfigError

MAX_BYTES = 2**20


def read_secret(path: str, flag: str) -> bytes:
    """Errors: ConfigError for a file that cannot be read, is larger than MAX_BYTES, or that others may read.

    A file of another owner may be read by its group: so Kubernetes mounts a Secret for users other than root.
    """
    try:
        with open_at_once(path) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{flag} {path} is no file; pass a regular file")
            _require_private(status, path, flag)
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{flag} {path} has more than {MAX_BYTES} bytes, the most that are read")
    return data


def open_at_once(path: str) -> BinaryIO:
    """To read; a fifo without a writer is not waited for. Errors: OSError."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _require_private(status: os.stat_result, path: str, flag: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    is_own = status.st_uid == os.geteuid()
    if mode & (0o077 if is_own else 0o037):
        raise ConfigError(
            f"{flag} {path} has mode {mode:04o}, so that others than its user can read or change it; "
            f"run chmod 600 {path}"
        )


def version_of(*paths: str | None) -> tuple[object, ...]:
    """What changes when one of these files is written, replaced or swapped behind a link."""
    versions: list[object] = []
    for path in paths:
        try:
            status = None if path is None else os.stat(path)
        except OSError as error:
            versions.append(error.errno)
        else:
            versions.append(status and (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode))
    return tuple(versions)
