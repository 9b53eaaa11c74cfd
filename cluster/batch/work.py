"""A batch that outlives its process: its journal, the rows that are done, and the output that they become."""

import contextlib
import gzip
import json
import os
import socket
import time
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cluster.batch.journal import Journal, create_journal, open_journal
from cluster.batch.records import Record
from cluster.batch.results import RowOrder
from cluster.batch.row_store import RowStore, write_whole
from cluster.batch.rows import KnownRow, digest
from cluster.batch.target import Target
from kernels_integration.errors import ConfigError, UnavailableError, shown

_SYNC_INTERVAL_S = 5.0
"""What a node that loses its power has not done, at most. A killed process loses nothing."""
_MAX_NAMED = 5


class BatchWork:
    """The state of one batch; a `Results` for the run that goes on with it.

    Rows that are done lie in rows_path, in the order in which they were done, and each has a line in the
    journal. `finish` makes the output of them, in the order of the input; then rows_path is gone, and the
    journal tells of the rows in the output.
    """

    def __init__(self, journal: Journal, rows_path: Path, target: Target, errors: Target) -> None:
        """For `open_work`."""
        self.rows_path = rows_path
        self.target = target
        self.notes: list[str] = []
        """What the user should know of what was found."""
        self.num_reused = 0
        self.num_changed = 0
        """Rows whose custom_id an earlier run has answered for another body."""
        self.changed: list[str] = []
        """The first of their custom_ids."""
        self._journal = journal
        self.errors = errors
        self._run = 1
        self._whole: Record | None = None
        self._has_errors_file = False
        self._is_empty = True
        self._retry_failed = False
        self._store: RowStore | None = None
        self._num_rows: int | None = None
        self._num_failed = 0
        self._num_done = 0
        self._by_id: dict[bytes, int] = {}
        """Rows of earlier runs: those of this one need not be found."""
        self._runs = array("I")
        """By number in the store, as `_anonymous`: rows that no custom_id stands for."""
        self._anonymous: set[int] = set()
        self._order = RowOrder()
        self._synced_s = time.monotonic()
        for record in journal.records():
            self._is_empty = False
            self._run = max(self._run, record.get("run", 0) + 1)
            self._whole = record.get("whole", self._whole)
            self._has_errors_file |= record.get("errors_file", False)
        if self._whole is not None:
            self._has_errors_file |= self._whole["failed"] > 0

    @property
    def journal_path(self) -> Path:
        return self._journal.path

    @property
    def num_done(self) -> int:
        """Rows that are done, those of earlier runs among them."""
        return self._num_done

    @property
    def is_whole(self) -> bool:
        """Whether the output has been finished, for the rows that the input had then."""
        return self._whole is not None

    def whole_already(self, rows: Iterable[KnownRow]) -> Mapping[str, int] | None:
        """Rows and failed rows of the output, where it has been finished for these very rows; else None."""
        whole = self._whole
        if whole is None or self.target.size() != whole["bytes"]:
            return None
        answered = (record["key"] for record in self._journal.records() if "key" in record)
        for row in rows:
            if next(answered, None) != row.key.hex():
                return None
        if next(answered, None) is not None:
            return None
        self.rows_path.unlink(missing_ok=True)  # of a run that was killed when all was done
        return {"rows": whole["rows"], "failed": whole["failed"]}

    def begin(self, *, num_rows: int | None, retry_failed: bool = False) -> int:
        """Be ready for rows. Returns how many an earlier run has left.

        num_rows: of the input, where that is known. retry_failed: those that failed do not count.
        Errors: UnavailableError; ConfigError when rows_path cannot be opened.
        """
        self._retry_failed = retry_failed
        self._num_rows = num_rows
        self._store = RowStore(_opened(self.rows_path), str(self.rows_path))
        if self._whole is not None:
            self._take_apart(self._whole)
        for record in self._journal.records():
            if record.get("custom_id") is None:  # a row that cannot be told again is looked at again
                continue
            start, size = record["start"], record["size"]
            if self._store.holds(start, size, record["crc"]):
                self._store.note(start, size, key=bytes.fromhex(record["key"]), failed=record["failed"])
                self._runs.append(record["run"])
                self._by_id[digest(record["custom_id"].encode())] = len(self._store) - 1
        self._num_done = len(self._by_id)
        self._store.trim()
        self._journal.append(
            {
                "run": self._run,
                "at": _now_s(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "rows": num_rows,
                "done": len(self._by_id),
            }
        )
        self._is_empty = not len(self._store)
        return len(self._by_id)

    def needs_answers(self, rows: Iterable[KnownRow]) -> bool:
        """Whether any of the input's rows has to be asked for; looks at no more of them than that takes."""
        seen: set[bytes] = set()
        for row in rows:
            if row.custom_id is None:
                continue  # it is refused, as one whose name is taken is
            own = digest(row.custom_id.encode())
            number = self._by_id.get(own)
            is_done = number is not None and self._rows.key(number) == row.key
            if own not in seen and (not is_done or (self._retry_failed and self._rows.failed(number or 0))):
                return True
            seen.add(own)
        return False

    def find(self, custom_id: str, key: bytes) -> int | None:
        number = self._by_id.get(digest(custom_id.encode()))
        if number is None:
            return None
        if self._rows.key(number) != key:
            self.num_changed += 1
            if self.num_changed <= _MAX_NAMED:
                self.changed.append(shown(custom_id))
            return None
        return None if self._retry_failed and self._rows.failed(number) else number

    def reuse(self, place: int, number: int) -> bool:
        self.num_reused += 1
        self._order.put(place, number)
        self._num_failed += self._rows.failed(number)
        return self._rows.failed(number)

    def add(self, place: int, row: str, *, custom_id: str | None, key: bytes, failed: bool) -> None:
        start, size, checksum = self._rows.append(row, key=key, failed=failed)
        self._is_empty = False
        number = len(self._rows) - 1
        self._runs.append(self._run)
        if custom_id is None:
            self._anonymous.add(number)
        if not self._by_id or custom_id is None or digest(custom_id.encode()) not in self._by_id:
            self._num_done += 1
        record = _record(custom_id, key, failed, self._run, start, size, checksum)
        self._num_failed += failed
        told = {"at": _now_s(), "done": self.num_done, "num_failed": self._num_failed, "rows": self._num_rows}
        self._journal.append(record | told)
        self._order.put(place, number)
        if time.monotonic() - self._synced_s > _SYNC_INTERVAL_S:
            self._sync()

    def finish(self) -> None:
        """Make the output of the rows at hand. Errors: UnavailableError: they stay, for a later run."""
        rows, order = self._rows, self._order
        self._sync()
        num_failed = sum(rows.failed(number) for number in order.numbers())
        size = self.target.publish(rows.row(number) for number in order.numbers())
        if num_failed:
            self.errors.publish(rows.row(number) for number in order.numbers() if rows.failed(number))
        elif self._has_errors_file:
            self.errors.remove()
        self._journal.replace(self._records_of_output(size, num_failed))
        self._is_empty = False
        self.rows_path.unlink()

    def close(self) -> None:
        """Where nothing was done, nothing is left."""
        if self._store is not None:
            self._store.close()
        if self._is_empty:
            self.rows_path.unlink(missing_ok=True)
            self._journal.path.unlink(missing_ok=True)
        self._journal.close()

    @property
    def _rows(self) -> RowStore:
        assert self._store is not None, "begin comes first"
        return self._store

    def _sync(self) -> None:
        """Rows first: the journal tells of no row that is not there."""
        try:
            self._rows.sync()
            self._journal.sync()
        except OSError as error:
            raise UnavailableError(f"{self.rows_path} takes no more: {error.strerror}") from error
        self._synced_s = time.monotonic()

    def _take_apart(self, whole: Record) -> None:
        """The rows of a whole output become rows that are done, for an input that has changed since."""
        if self.target.size() != whole["bytes"]:
            self.notes.append(f"{self.target.name} is not as it was finished; its rows are answered again")
            self._journal.replace([{"run": self._run - 1, "errors_file": self._has_errors_file}])
            return

        def moved() -> Iterator[Record]:
            yield {"run": self._run - 1, "errors_file": self._has_errors_file}
            with self.target.open() as stream, contextlib.suppress(EOFError, zlib.error, gzip.BadGzipFile):
                for record in self._journal.records():
                    if "key" not in record:
                        continue
                    data = stream.read(record["size"])
                    if zlib.crc32(data) == record["crc"]:
                        write_whole(descriptor, data, record["start"])
                        yield record

        descriptor = os.open(self.rows_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._journal.replace(moved())
        finally:
            os.close(descriptor)

    def _records_of_output(self, num_bytes: int, num_failed: int) -> Iterator[Record]:
        rows, start = self._rows, 0
        for number in self._order.numbers():
            line = rows.row(number)
            custom_id = None if number in self._anonymous else json.loads(line)["custom_id"]
            key, failed, run = rows.key(number), rows.failed(number), self._runs[number]
            yield _record(custom_id, key, failed, run, start, len(line), zlib.crc32(line))
            start += len(line)
        yield {
            "run": self._run,
            "whole": {"rows": len(self._order), "failed": num_failed, "bytes": num_bytes},
            "at": _now_s(),
        }


@contextmanager
def open_work(
    journal_path: Path, target: Target, errors: Target, *, settings: Record, restart: bool = False
) -> Iterator[BatchWork]:
    """The work on an output, begun by an earlier run or now.

    settings: what the answers depend on, beside the rows. restart: forget what earlier runs have done.
    Errors: ConfigError: another run is at it, the files are not ours, or earlier runs had other settings.
    """
    rows_path = rows_path_of(journal_path)
    try:
        journal = open_journal(journal_path)
        if journal is None:
            if os.path.lexists(rows_path):
                raise ConfigError(f"{rows_path} is there without its journal {journal_path}; move it away")
            journal = create_journal(journal_path, settings)
        elif restart:
            rows_path.unlink(missing_ok=True)
            journal.settings = settings
            journal.replace(())
    except OSError as error:
        raise ConfigError(f"the journal {journal_path} cannot be written: {error.strerror}") from error
    try:
        if journal.settings != settings and not any("key" in record for record in journal.records()):
            journal.settings = settings  # of a run that was killed before its first row
            journal.replace(())
        _require_same(journal, settings, target)
        work = BatchWork(journal, rows_path, target, errors)
    except BaseException:
        journal.close()
        raise
    try:
        yield work
    finally:
        work.close()


def rows_path_of(journal_path: Path) -> Path:
    return journal_path.with_name(journal_path.name.removesuffix(".journal") + ".partial")


def _require_same(journal: Journal, settings: Record, target: Target) -> None:
    names = [name for name in journal.settings | settings if journal.settings.get(name) != settings.get(name)]
    if names:
        told = ", ".join(
            f"{name} was {shown(journal.settings.get(name))} and is {shown(settings.get(name))}"
            for name in names
        )
        raise ConfigError(
            f"{target.name} was begun with other settings ({told}; {journal.path} is its journal), and one "
            "file holds answers of one kind: use those again, pass another --output, or answer all rows anew "
            "with --restart"
        )


def _opened(rows_path: Path) -> int:
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(rows_path, flags, 0o600)
    except OSError as error:
        raise ConfigError(f"{rows_path} cannot be opened: {error.strerror}; move it away") from error


def _record(
    custom_id: str | None, key: bytes, failed: bool, run: int, start: int, size: int, checksum: int
) -> Record:
    return {
        "custom_id": custom_id,
        "key": key.hex(),
        "failed": failed,
        "run": run,
        "start": start,
        "size": size,
        "crc": checksum,
    }


def _now_s() -> float:
    return round(time.time(), 3)
