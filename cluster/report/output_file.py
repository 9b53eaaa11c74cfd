"""Where a command writes: a file that appears when it is whole, or whatever else the user names.

Three kinds of outputs, told apart by what is there, never by trying:
- a regular file, or none yet: rows go to a new file beside it, which replaces it at the end. Links are
  followed first, so the link stays and its target gets the rows.
- an open descriptor (`-`, /dev/stdout, /dev/fd/3): written into as it is, neither truncated nor replaced.
- anything else (a device, a fifo): opened and written into.
"""

import contextlib
import fcntl
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels_integration.errors import ConfigError, UnavailableError

STANDARD = "-"
_DESCRIPTOR = re.compile(r"/dev/(?:stdout|stderr|fd/(\d+))|/proc/self/fd/(\d+)")


class OutputFile:
    """Takes lines; each is handed to the system at once, whole or not at all."""

    def __init__(
        self, path: str, descriptor: int, flag: str, *, replaces: tuple[Path, Path] | None = None
    ) -> None:
        """descriptor: owned from now on. flag: that the user gave the path by. replaces: the file to write
        and the one that it becomes."""
        self.path = path
        self._flag = flag
        self.num_lines = 0
        self._descriptor = descriptor
        self._partial: Path | None = replaces[0] if replaces else None
        self._target = replaces[1] if replaces else None
        self._num_bytes = 0
        # zlib's 31: a gzip stream. Each row ends a block, so that those of an interrupted run can be read.
        self._gzip = zlib.compressobj(wbits=31) if path.endswith(".gz") else None

    @property
    def where(self) -> str:
        """Where the rows are now."""
        if self._partial is not None:
            return str(self._partial)
        return "the standard output" if self.path == STANDARD else self.path

    def write(self, line: str) -> None:
        """Errors: UnavailableError when the system does not take it: disk full, pipe closed."""
        # A lone surrogate stands inside a JSON string, where \udXXX is its own escape.
        self.write_line((line + "\n").encode(errors="backslashreplace"))

    def write_line(self, data: bytes) -> None:
        """The same for bytes that end in a newline."""
        if self._gzip is not None:
            data = self._gzip.compress(data) + self._gzip.flush(zlib.Z_SYNC_FLUSH)
        self._write(data)
        self.num_lines += 1

    def finish(self) -> None:
        """Make everything safe and put it in its place. Errors: UnavailableError."""
        if self._gzip is not None:
            self._write(self._gzip.flush())
        if self._partial is not None and self._target is not None:
            try:
                os.fsync(self._descriptor)
                self._partial.replace(self._target)
            except OSError as error:
                raise self._takes_no_more(error) from error
            self._partial = None  # the name may be another batch's from now on

    def close(self) -> None:
        """A file without rows is removed."""
        if self._partial is not None and self.num_lines == 0:
            self._partial.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # has been told: every write went straight to the system
            os.close(self._descriptor)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except BaseException as error:
            if self._partial is not None:
                os.ftruncate(self._descriptor, self._num_bytes)  # no half row in what is kept
            if isinstance(error, OSError):
                raise self._takes_no_more(error) from error
            raise
        self._num_bytes += len(data)

    def _takes_no_more(self, error: OSError) -> UnavailableError:
        return UnavailableError(f"{self._flag} {self.path} takes no more: {error.strerror}")


@contextmanager
def open_output(path: str, *, flag: str = "--output", input_path: str = STANDARD) -> Iterator[OutputFile]:
    """The output, which is whole at the end of the `with`.

    A regular file appears, or is replaced, then. Until then the rows are in PATH.partial (PATH.partial.2 and
    so on where an earlier run left its own, which is never touched); after an interruption that file stays
    unless it is empty.
    Errors: ConfigError when it cannot be written, is the input, or is being written by another batch;
    UnavailableError as of `OutputFile.write`.
    """
    output = _open(path, flag, input_path)
    try:
        yield output
        output.finish()
    finally:
        output.close()


def check_output(path: str, *, flag: str) -> None:
    """Whether `open_output` may work later, without touching anything now. Errors: ConfigError."""
    try:
        found = _stat_of(path)
        if _descriptor_of(path) is not None:
            return
        if not path or path.endswith("/") or (found is not None and stat.S_ISDIR(found.st_mode)):
            raise _unwritable(path, flag, "it is a directory")
        is_file = found is None or stat.S_ISREG(found.st_mode)
        place = os.path.dirname(os.path.realpath(path)) if is_file else path
        if not os.path.exists(place):
            raise FileNotFoundError(0, "its directory does not exist")
        if not os.access(place, os.W_OK | os.X_OK if is_file else os.W_OK):
            raise PermissionError(0, "permission denied")
    except (OSError, ValueError) as error:
        raise _unwritable(path, flag, getattr(error, "strerror", None) or str(error)) from error


def replaced_file(path: str, *, flag: str = "--output") -> Path | None:
    """The regular file that stands at `path`, or would: links followed. None: a descriptor, device or fifo.

    Errors: ConfigError when it cannot be written; nothing is touched.
    """
    check_output(path, flag=flag)
    found = _stat_of(path)
    if _descriptor_of(path) is not None or (found is not None and not stat.S_ISREG(found.st_mode)):
        return None
    return Path(os.path.realpath(path))


def _open(path: str, flag: str, input_path: str) -> OutputFile:
    try:
        if (number := _descriptor_of(path)) is not None:
            return OutputFile(path, os.dup(number), flag)
        found = _stat_of(path)
        if not path or path.endswith("/") or (found is not None and stat.S_ISDIR(found.st_mode)):
            raise _unwritable(path, flag, "it is a directory")
        if found is not None and not stat.S_ISREG(found.st_mode):
            return OutputFile(path, os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC), flag)
        _refuse_input(path, input_path, found)
        target = Path(os.path.realpath(path))
        partial, descriptor = _create_partial(path, flag, target)
    except (OSError, ValueError) as error:  # ValueError: a NUL character
        raise _unwritable(path, flag, getattr(error, "strerror", None) or str(error)) from error
    return OutputFile(path, descriptor, flag, replaces=(partial, target))


def _create_partial(path: str, flag: str, target: Path) -> tuple[Path, int]:
    """A new file that is ours alone, locked. A name that is taken - a link, too - is left as it is."""
    number = 1
    while True:
        partial = _partial_name(target, number)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            break
        except FileExistsError:
            number += 1
    with contextlib.suppress(OSError):  # some network file systems have no locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    # After our own lock is there: of two batches that start at once, at least one sees the other.
    other = next((p for p in _partials(target) if p != partial and _is_locked(p)), None)
    if other is not None:
        partial.unlink()
        os.close(descriptor)
        raise ConfigError(
            f"{flag} {path} is being written by another run ({other} is its file); wait for its end, "
            "or pass another file"
        )
    return partial, descriptor


def _partial_name(target: Path, number: int) -> Path:
    return target.with_name(f"{target.name}.partial" + (f".{number}" if number > 1 else ""))


def _partials(target: Path) -> list[Path]:
    name = re.compile(re.escape(target.name) + r"\.partial(\.\d+)?")
    with contextlib.suppress(PermissionError):  # a folder may be writable and not readable
        return [path for path in target.parent.iterdir() if name.fullmatch(path.name)]
    return []


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False  # gone by now, a link, or not readable: no partial file of this user
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _descriptor_of(path: str) -> int | None:
    """The number of an open descriptor that `path` stands for."""
    if path in (STANDARD, "/dev/stdout"):
        return 1
    match = _DESCRIPTOR.fullmatch(path)
    if match is None:
        return None
    return 2 if path == "/dev/stderr" else int(match[1] or match[2])


def _stat_of(path: str) -> os.stat_result | None:
    """Of what is there, links followed; None: nothing (a link may point there)."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _refuse_input(path: str, input_path: str, found: os.stat_result | None) -> None:
    if found is None:
        return
    try:
        source = os.fstat(sys.stdin.fileno()) if input_path == STANDARD else os.stat(input_path)
    except (OSError, ValueError):  # a stdin that is no file
        return
    if os.path.samestat(source, found):
        raise ConfigError(f"--output {path} would overwrite --input {input_path}; pass another file")


def _unwritable(path: str, flag: str, cause: str) -> ConfigError:
    return ConfigError(f"{flag} {path} cannot be written: {cause}; pass a file in a writable directory, or -")
