"""Progress on stderr: a bar for people at a terminal, nothing for logs and pipes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class ProgressBar(Protocol):
    def advance(self, num_done: int = 1) -> None: ...


class _Silent:
    def advance(self, num_done: int = 1) -> None:
        pass


@contextmanager
def progress_bar(description: str, total: int | None, *, enabled: bool = True) -> Iterator[ProgressBar]:
    """A bar that counts to `total` (None: unknown). Shown only where stderr is a terminal."""
    if not enabled or not sys.stderr.isatty():
        yield _Silent()
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
