"""Progress on stderr: a bar for people at a terminal, a line now and then for logs."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Protocol


class ProgressBar(Protocol):
    def advance(self, num_done: int = 1) -> None: ...


class _Silent:
    def advance(self, num_done: int = 1) -> None:
        pass


LOG_INTERVAL_S = 10.0


class _LogLines:
    """Tells every LOG_INTERVAL_S how far it is, also while nothing advances."""

    def __init__(self, description: str, total: int | None) -> None:
        self._description = description
        self._total = "" if total is None else f" of {total}"
        self._num_done = 0
        self._start_s = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._thread.start()

    def advance(self, num_done: int = 1) -> None:
        self._num_done += num_done

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._done.wait(LOG_INTERVAL_S):
            elapsed_s = time.monotonic() - self._start_s
            print(
                f"[{elapsed_s:5.1f} s] {self._description}: {self._num_done}{self._total}",
                file=sys.stderr,
                flush=True,
            )


@contextmanager
def progress_bar(
    description: str, total: int | None, *, enabled: bool = True, in_logs: bool = False
) -> Iterator[ProgressBar]:
    """A bar that counts to `total` (None: unknown). Where stderr is no terminal: lines, if in_logs."""
    if not enabled or not (sys.stderr.isatty() or in_logs):
        yield _Silent()
        return
    if not sys.stderr.isatty():
        with closing(_LogLines(description, total)) as lines:
            yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    ) as progress:
        task = progress.add_task(description, total=total)

        class Bar:
            def advance(self, num_done: int = 1) -> None:
                progress.advance(task, num_done)

        yield Bar()
