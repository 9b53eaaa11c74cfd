"""The journal of a batch: one JSON line for each row that is done, in a file beside the output.

    {"journal": 1, "settings": {"model": "...", "dtype": "float32", ...}}
    {"run": 1, "at": 1764541551.2, "host": "n1", "pid": 77, "rows": 400, "done": 0}
    {"custom_id": "a", "key": "9f...", "failed": false, "run": 1, "start": 0, "size": 412, "crc": 7, ...}
    {"whole": {"rows": 400, "failed": 3, "bytes": 181722}}

First what the answers depend on; then a line for each start of the command and each row; `whole` once the
output is. `start`, `size` and `crc` (CRC-32) find a row among the rows done; in a whole journal, in the text
of the output. custom_id is null for rows that have none of their own.
Lines are only ever appended, or the file replaced as a whole: what a killed run leaves is good up to its last
line end.
"""

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from cluster.batch.records import Record, fault_of
from cluster.batch.row_store import write_whole
from kernels_integration.errors import ConfigError, UnavailableError

VERSION = 1
_LOOK_S = 0.1
"""Longer than `latentray status` has a journal locked, to see whether it is."""


class Journal:
    """An open journal, locked: nobody else's batch writes it meanwhile.

    path: where it lies. settings: of its first line.
    """

    def __init__(self, path: Path, descriptor: int, settings: Record) -> None:
        """For `open_journal` and `create_journal`. descriptor: owned from now on."""
        self.path = path
        self.settings = settings
        self._descriptor = descriptor
        self._end = os.fstat(descriptor).st_size

    def records(self) -> Iterator[Record]:
        """All lines but the first; once they have been read, what is behind the last whole one is cut off.

        Errors: ConfigError for a line that no journal of ours has; nothing is cut off then.
        """
        position = number = 0
        with os.fdopen(os.dup(self._descriptor), "rb") as stream:
            stream.seek(0)
            for line in stream:
                record = _parsed(line)
                if record is None:
                    break
                position += len(line)
                number += 1
                if "journal" in record:
                    continue
                if (fault := fault_of(record)) is not None:
                    raise ConfigError(
                        f"line {number} of the journal {self.path} is not as latentray writes them: {fault}; "
                        "put it right, remove the line (its row is answered again), or answer all rows anew "
                        "with --restart"
                    )
                yield record
        if os.fstat(self._descriptor).st_size > position:
            os.ftruncate(self._descriptor, position)
        self._end = position

    def append(self, record: Record) -> None:
        """Errors: UnavailableError when the system takes no more."""
        data = _line(record)
        try:
            write_whole(self._descriptor, data, self._end)
        except OSError as error:
            raise UnavailableError(f"{self.path} takes no more: {error.strerror}") from error
        self._end += len(data)

    def replace(self, records: Iterable[Record]) -> None:
        """Let these be all records. Errors: UnavailableError."""
        try:
            descriptor = _written(self.path, self.settings, records)
        except OSError as error:
            raise UnavailableError(f"{self.path} cannot be replaced: {error.strerror}") from error
        os.close(self._descriptor)
        self._descriptor, self._end = descriptor, os.fstat(descriptor).st_size

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def open_journal(path: Path) -> Journal | None:
    """The journal that lies there; None: none does. Errors: ConfigError: not ours, or another run has it."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigError(f"the journal {path} cannot be opened: {error.strerror}; {_FIX}") from error
        try:
            _lock(descriptor, path)
            if not _is_at(descriptor, path):  # replaced while we waited for nothing: look again
                os.close(descriptor)
                continue
            with os.fdopen(os.dup(descriptor), "rb") as stream:
                stream.seek(0)
                header = _parsed(stream.readline(2**20)) or {}
            if header.get("journal") != VERSION or not isinstance(header.get("settings"), dict):
                raise ConfigError(f"{path} is no journal that this version of latentray reads; {_FIX}")
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        return Journal(path, descriptor, header["settings"])


def create_journal(path: Path, settings: Record) -> Journal:
    """A new one, in place of none. Errors: ConfigError: another run has made one just now; OSError."""
    descriptor = _written(path, settings, (), replaces=False)
    return Journal(path, descriptor, settings)


_FIX = "move it away, pass another --output, or name another file by --journal"


def _written(path: Path, settings: Record, records: Iterable[Record], *, replaces: bool = True) -> int:
    """A journal appears at once, whole and locked."""
    # Who replaces a journal has it locked; of those who make the first one, each has a name of its own.
    new = path.with_name(f"{path.name}.new" if replaces else f"{path.name}.{os.getpid()}.new")
    new.unlink(missing_ok=True)  # of a run that was killed here
    descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, path)
        with os.fdopen(os.dup(descriptor), "wb") as stream:
            stream.write(_line({"journal": VERSION, "settings": settings}))
            for record in records:
                stream.write(_line(record))
        os.fsync(descriptor)
        if replaces:
            new.replace(path)
        else:
            _put(new, path)
    except BaseException:
        os.close(descriptor)
        new.unlink(missing_ok=True)
        raise
    return descriptor


def _put(new: Path, path: Path) -> None:
    """Give a file a name that is free. Errors: ConfigError when another run was quicker; OSError."""
    try:
        os.link(new, path)
    except FileExistsError as error:
        raise _in_use(path) from error
    except OSError:  # a file system without hard links
        new.replace(path)
    else:
        new.unlink()


def _lock(descriptor: int, path: Path) -> None:
    for is_last in (False, True):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if is_last:
                raise _in_use(path) from error
            time.sleep(_LOOK_S)
        except OSError:
            return  # some network file systems have no locks


def _in_use(path: Path) -> ConfigError:
    return ConfigError(
        f"the output is being written by another run ({path} is its journal); wait for its end, or pass "
        "another --output"
    )


def _is_at(descriptor: int, path: Path) -> bool:
    ours = os.fstat(descriptor)
    if not stat.S_ISREG(ours.st_mode):
        raise ConfigError(f"{path} is no regular file; {_FIX}")
    try:
        return os.path.samestat(ours, os.lstat(path))
    except FileNotFoundError:
        return False


def _line(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _parsed(line: bytes) -> Record | None:
    """None: not a whole line."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
