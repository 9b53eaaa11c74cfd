"""The rows that a batch reads: a file, many files, or stdin; local or behind a URL; as they come, never all.

`-` is stdin. A directory stands for the files in it, a pattern (* ? [) for those that fit, in the order of
their names. What a name ends in tells the format: .parquet; else JSONL, decompressed for .gz and .zst.
"""

import fnmatch
import glob
import os
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any, Protocol, cast

from cluster.batch.parquet import count_parquet_rows, parquet_rows
from cluster.batch.rows import MAX_ROW_BYTES, InputRow
from cluster.batch.target import file_system, is_url
from cluster.batch.zstd import zstd_reader
from kernels_integration.errors import ConfigError

STANDARD = "-"
_MARKS = frozenset("*?[")
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
"""Of the files that a directory stands for."""


class _Files(Protocol):
    """Where files lie."""

    def open(self, path: str) -> IO[bytes]: ...

    def is_dir(self, path: str) -> bool: ...

    def is_pattern(self, path: str) -> bool: ...

    def is_regular(self, path: str) -> bool:
        """Whether it may be read more than once. Errors: OSError when it cannot be read at all."""
        ...

    def names(self, folder: str) -> Sequence[str]:
        """Paths of the files in it; subfolders are left out."""
        ...

    def fitting(self, pattern: str) -> Sequence[str]: ...


class _LocalFiles:
    def open(self, path: str) -> IO[bytes]:
        return Path(path).open("rb")

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def is_pattern(self, path: str) -> bool:
        return bool(_MARKS & set(path)) and not os.path.exists(path)

    def is_regular(self, path: str) -> bool:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False  # a fifo must not be opened for a look: its writer would lose its reader
        self.open(path).close()
        return True

    def names(self, folder: str) -> Sequence[str]:
        return [entry.path for entry in os.scandir(folder) if not entry.is_dir()]

    def fitting(self, pattern: str) -> Sequence[str]:
        return [path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)]


class _UrlFiles:
    def __init__(self, system: Any) -> None:
        self._system = system

    def open(self, path: str) -> IO[bytes]:
        return cast("IO[bytes]", self._system.open(path, "rb"))

    def is_dir(self, path: str) -> bool:
        return bool(self._system.isdir(path))

    def is_pattern(self, path: str) -> bool:
        return bool(_MARKS & set(path))

    def is_regular(self, path: str) -> bool:
        self.open(path).close()
        return True

    def names(self, folder: str) -> Sequence[str]:
        return [found["name"] for found in self._system.ls(folder, detail=True) if found["type"] == "file"]

    def fitting(self, pattern: str) -> Sequence[str]:
        found = self._system.glob(pattern, detail=True)
        return [path for path, entry in found.items() if entry["type"] == "file"]


class BatchInput:
    """What --input stands for. is_once: `rows` can be read once only: stdin, a fifo, a device.

    Errors, of all methods: ConfigError: nothing is there, or it cannot be read, at once or while it is.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._files: _Files = _LocalFiles()
        self.paths = [name]
        self.is_once = name == STANDARD
        self._is_pattern = False
        if self.is_once:
            return
        path = name
        if is_url(name):
            system, path = file_system(name, flag="--input")
            self._files = _UrlFiles(system)
        with self._told(name):
            self.paths = self._found(path)

    def rows(self) -> Iterator[InputRow]:
        """Rows that are not blank."""
        for path in self.paths:
            file = "" if len(self.paths) == 1 else f"{path} "
            for number, line in self._numbered(path):
                yield InputRow(line=line, place=f"{file}{number}")

    def count(self) -> int | None:
        """How many rows there are, for progress; None where that would consume them, or fetch them."""
        if self.is_once or is_url(self.name):
            return None
        return sum(self._count(path) for path in self.paths)

    def refuse_output(self, written: Sequence[Path]) -> None:
        """Errors: ConfigError when one of the files to be written is read, or would be by the next run."""
        if is_url(self.name):
            return
        for target in written:
            for path in self.paths:
                if _is_same(path, target):
                    raise ConfigError(f"--output {target} would overwrite --input {path}; pass another file")
            if self._would_stand_for(target):
                raise ConfigError(
                    f"--input {self.name} would stand for --output {target}, too; pass a file elsewhere"
                )

    def _found(self, path: str) -> list[str]:
        if self._files.is_dir(path):
            names = [n for n in self._files.names(path) if not os.path.basename(n).startswith((".", "_"))]
            if strange := sorted(name for name in names if not name.endswith(SUFFIXES)):
                raise ConfigError(
                    f"--input {self.name} holds {strange[0]}, which is none of {', '.join(SUFFIXES)}; "
                    f"move it away, or pass a pattern such as {self.name.rstrip('/')}/*.jsonl"
                )
            paths = names
        elif self._files.is_pattern(path):
            self._is_pattern = True
            paths = list(self._files.fitting(path))
        else:
            self.is_once = not self._files.is_regular(path)
            return [path]
        if not paths:
            raise ConfigError(
                f"--input {self.name} stands for no file; pass a file, a directory or a pattern"
            )
        if once := [found for found in paths if not self._files.is_regular(found)]:
            raise ConfigError(f"--input {self.name} stands for {once[0]}, which is no regular file")
        return sorted(paths)

    def _would_stand_for(self, target: Path) -> bool:
        """Whether a file there would be among those of the next run."""
        if os.path.isdir(self.name):
            return os.path.samefile(self.name, target.parent)
        if not self._is_pattern:
            return False
        pattern = os.path.abspath(self.name)
        if "**" in pattern:
            return fnmatch.fnmatch(str(target), pattern.replace("**/", "*"))
        folder, name = os.path.split(pattern)
        return fnmatch.fnmatch(target.name, name) and fnmatch.fnmatch(os.path.dirname(target), folder)

    def _numbered(self, path: str) -> Iterator[tuple[str, bytes]]:
        with self._told(path):
            if path == STANDARD:
                yield from _lines(sys.stdin.buffer)
                return
            with self._files.open(path) as file:
                if path.endswith(".parquet"):
                    yield from parquet_rows(file, path)
                else:
                    yield from _lines(_decompressed(file, path))

    def _count(self, path: str) -> int:
        if path.endswith(".parquet"):
            with self._told(path), self._files.open(path) as file:
                return count_parquet_rows(file, path)
        return sum(1 for _ in self._numbered(path))

    @contextmanager
    def _told(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, EOFError, zlib.error, ValueError) as error:
            told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ConfigError(
                f"--input {path} cannot be read: {told or type(error).__name__}; pass JSONL (.gz, .zst) or "
                "Parquet: a file, a directory, a pattern, a URL, or -"
            ) from error


def _lines(stream: IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Lines with their numbers; of one longer than MAX_ROW_BYTES only so much that this can be told."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        kept = line
        while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
            line = stream.readline(MAX_ROW_BYTES + 1)
        if kept.strip():
            yield f"line {number}", kept


def _decompressed(file: IO[bytes], path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return cast("IO[bytes]", GzipFile(fileobj=file))
    if path.endswith(".zst"):
        return zstd_reader(file, path)
    return file


def _is_same(path: str, target: Path) -> bool:
    try:
        source = os.fstat(sys.stdin.fileno()) if path == STANDARD else os.stat(path)
        return os.path.samestat(source, os.stat(target))
    except (OSError, ValueError):  # nothing there yet; a stdin that is no file
        return False
