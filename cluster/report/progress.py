"""Progress on stderr: a bar for people at a terminal, a line now and then for logs."""

import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol


class ProgressBar(Protocol):
    def advance(self, num_done: int = 1, *, timed: bool = True) -> None:
        """timed: False for what took no time, and would only make the rest seem quick."""
        ...


class _Silent:
    def advance(self, num_done: int = 1, *, timed: bool = True) -> None:
        pass


LOG_INTERVAL_S = 10.0
_RATE_PERIODS = 6
"""Rates are of so many log intervals."""


def rate_and_rest(per_s: float, num_left: int | None) -> str:
    """How quick, and how long it will still take where that is known: "12.5/s, 3 min 20 s left"."""
    if not num_left or not per_s:
        return f"{per_s:.1f}/s"
    return f"{per_s:.1f}/s, {duration(num_left / per_s)} left"


def duration(seconds: float) -> str:
    """In two units: "2 d 3 h", "5 min 10 s"."""
    rest = round(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


class _LogLines:
    """Tells every LOG_INTERVAL_S how far it is, also while nothing advances."""

    def __init__(self, description: str, total: int | None) -> None:
        self._description = description
        self._total = total
        self._num_done = 0
        self._num_timed = 0
        self._start_s = time.monotonic()
        self._samples = deque([(self._start_s, 0)], maxlen=_RATE_PERIODS)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="progress", daemon=True)
        self._thread.start()

    def advance(self, num_done: int = 1, *, timed: bool = True) -> None:
        self._num_done += num_done
        self._num_timed += num_done if timed else 0

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._done.wait(LOG_INTERVAL_S):
            now_s, num_done, num_timed = time.monotonic(), self._num_done, self._num_timed
            since_s, before = self._samples[0]
            self._samples.append((now_s, num_timed))
            left = None if self._total is None else self._total - num_done
            total = "" if self._total is None else f" of {self._total}"
            rate = rate_and_rest((num_timed - before) / (now_s - since_s), left)
            print(
                f"[{now_s - self._start_s:5.1f} s] {self._description}: {num_done}{total}, {rate}",
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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Any) -> Text:
            left = None if task.total is None else int(task.total - task.completed)
            return Text(rate_and_rest(task.speed or 0.0, left))

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate()
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=60) as progress:
        task = progress.add_task(description, total=total)
        num_untimed = 0

        class Bar:
            def advance(self, num_done: int = 1, *, timed: bool = True) -> None:
                nonlocal num_untimed
                if timed:
                    progress.advance(task, num_done)
                    return
                num_untimed += num_done  # a smaller rest is to do
                progress.update(task, total=None if total is None else total - num_untimed)

        yield Bar()
