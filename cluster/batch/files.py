"""Where a batch reads and writes. `-` is stdin and stdout."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels_integration.errors import ConfigError

STANDARD = "-"


@contextmanager
def open_input(path: str) -> Iterator[Iterable[bytes]]:
    """The lines of a file. Errors: ConfigError when it cannot be read."""
    if path == STANDARD:
        yield sys.stdin.buffer
        return
    try:
        stream = Path(path).open("rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(
            f"--input {path} cannot be read: {error.strerror}; pass a JSONL file or -"
        ) from error
    with stream:
        yield stream


def count_rows(path: str) -> int | None:
    """Rows of a file, for the progress bar; None where that would consume them."""
    if not Path(path).is_file():
        return None
    with Path(path).open("rb") as stream:
        return sum(1 for line in stream if line.strip())


@contextmanager
def open_output(path: str, *, input_path: str = STANDARD) -> Iterator[Callable[[str], None]]:
    """A function that writes a line at once.

    A file appears under its own name only when it is whole: until then its rows, in the order of the
    input, are in PATH.partial, which stays after an interruption unless it is empty.
    Errors: ConfigError when it cannot be written, or is the input, which the answers would replace.
    """
    if path == STANDARD:

        def write_standard(line: str) -> None:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()

        yield write_standard
        return
    partial = Path(f"{path}.partial")
    if input_path != STANDARD and any(
        os.path.realpath(input_path) == os.path.realpath(p) for p in (path, partial)
    ):
        raise ConfigError(
            f"--output {path} would overwrite --input {input_path} (rows go to {partial.name} first); "
            "pass another file"
        )
    try:
        if Path(path).is_dir():  # "" is the current one
            raise IsADirectoryError(0, "it is a directory")
        stream = partial.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {path} cannot be written: {error.strerror}; pass a file in a writable directory, or -"
        ) from error
    with stream:

        def write(line: str) -> None:
            stream.write(line + "\n")
            stream.flush()

        try:
            yield write
        except BaseException:
            if stream.tell() == 0:
                partial.unlink()
            raise
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
