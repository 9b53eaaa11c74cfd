"""Where the answers of a batch appear once all are there: a file, or an object behind a URL."""

import contextlib
import gzip
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, cast

from cluster.report.output_file import OutputFile
from kernels_integration.errors import ConfigError, UnavailableError


class Target(Protocol):
    """name: as the user gave it."""

    name: str

    def size(self) -> int | None:
        """Bytes of what is there, compressed or not; None: nothing is."""
        ...

    def publish(self, rows: Iterable[bytes]) -> int:
        """Put these lines there, in place of what was, all at once. Returns the size.

        Errors: UnavailableError.
        """
        ...

    def open(self) -> contextlib.AbstractContextManager[IO[bytes]]:
        """The lines that are there."""
        ...

    def remove(self) -> None:
        """Nothing is there any more."""
        ...


class LocalTarget:
    """A regular file; path: links followed. A name that ends in .gz is compressed."""

    def __init__(self, name: str, path: Path, flag: str = "--output") -> None:
        self.name = name
        self.path = path
        self._flag = flag

    def size(self) -> int | None:
        try:
            return self.path.stat().st_size
        except FileNotFoundError:
            return None

    def publish(self, rows: Iterable[bytes]) -> int:
        # A fixed name: what a killed run has left is replaced. Whoever is here holds the journal's lock.
        new = self.path.with_name(f"{self.path.name}.new")
        try:
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"{self._flag} {self.name} takes no more: {error.strerror}") from error
        file = OutputFile(self.name, descriptor, self._flag, replaces=(new, self.path))
        try:
            for row in rows:
                file.write_line(row)
            file.finish()
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        finally:
            file.close()
        return self.path.stat().st_size

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        with self.path.open("rb") as file:
            yield cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if self.name.endswith(".gz") else file

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


class UrlTarget:
    """An object of one of fsspec's file systems. It is written at once, from a file beside the journal."""

    def __init__(self, url: str, scratch: Path, flag: str = "--output") -> None:
        """scratch: a local file on its way there or back. Errors: ConfigError when there is no such file
        system here."""
        self.name = url
        self._scratch = scratch
        self._flag = flag
        self._system, self._path = file_system(url, flag=flag)

    def size(self) -> int | None:
        with self._told():
            try:
                return int(self._system.info(self._path)["size"])
            except FileNotFoundError:
                return None

    def publish(self, rows: Iterable[bytes]) -> int:
        local = LocalTarget(self.name, self._scratch, self._flag)
        size = local.publish(rows)
        with self._told():
            with contextlib.suppress(NotImplementedError):
                self._system.makedirs(self._system._parent(self._path), exist_ok=True)
            self._system.put_file(str(self._scratch), self._path)
        local.remove()
        return size

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        with self._told():
            self._system.get_file(self._path, str(self._scratch))
        try:
            with LocalTarget(self.name, self._scratch).open() as stream:
                yield stream
        finally:
            self._scratch.unlink(missing_ok=True)

    def remove(self) -> None:
        with self._told(), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise UnavailableError(f"{self._flag} {self.name} cannot be used: {error}") from error


def is_url(path: str) -> bool:
    return "://" in path


def file_system(url: str, *, flag: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it. Errors: ConfigError."""
    import fsspec

    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(
            f"{flag} {url} cannot be reached: {error}; latentray reads and writes what fsspec does"
        ) from error
