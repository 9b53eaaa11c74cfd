"""The rows that a batch reads. `-` is stdin; a name that ends in .gz is decompressed."""

import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from gzip import GzipFile
from pathlib import Path
from typing import BinaryIO

from cluster.batch.rows import MAX_ROW_BYTES
from kernels_integration.errors import ConfigError

STANDARD = "-"


@contextmanager
def open_input(path: str) -> Iterator[Iterator[bytes]]:
    """The lines of a file; of one that is longer than MAX_ROW_BYTES only so much that this can be told.

    Errors: ConfigError when it cannot be read, at once or while it is read.
    """
    if path == STANDARD:
        yield _bounded_lines(sys.stdin.buffer, path)
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise _unreadable(path, error) from error
    with file:
        stream = GzipFile(fileobj=file) if path.endswith(".gz") else file
        yield _bounded_lines(stream, path)


def count_rows(path: str) -> int | None:
    """Rows of a file, for the progress bar; None where that would consume them."""
    if not Path(path).is_file():
        return None
    with open_input(path) as lines:
        return sum(1 for line in lines if line.strip())


def _bounded_lines(stream: BinaryIO | GzipFile, path: str) -> Iterator[bytes]:
    try:
        while line := stream.readline(MAX_ROW_BYTES + 1):
            yield line
            while len(line) > MAX_ROW_BYTES and not line.endswith(b"\n"):
                line = stream.readline(MAX_ROW_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: Exception) -> ConfigError:
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return ConfigError(
        f"--input {path} cannot be read: {told}; pass a JSONL file, one with gzip as .gz, or -"
    )
