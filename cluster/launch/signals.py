"""Signals that end a command: when they may act, and what exit codes they give."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, *((signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ()))
"""Ctrl-C, a supervisor's request, and the end of the terminal."""


def exit_on_signals() -> None:
    """End at once, with the exit code of the signal: nothing has been started yet."""
    for number in _heeded():
        signal.signal(number, lambda number, _frame: os._exit(128 + number))


def unwind_on_signals() -> list[int]:
    """Unwind at SIGTERM and SIGHUP as at Ctrl-C, so that what was started is stopped.

    The list holds the signals that have come: where one interrupts a call of Ray's, Ray raises SystemExit(1)
    in the place of ours, and where one interrupts an import, that may be swallowed and show as any error.
    """
    received: list[int] = []

    def unwind(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in _heeded():
        signal.signal(number, unwind)
    return received


def _heeded() -> list[signal.Signals]:
    """Those of ENDING that act: `nohup` ignores the terminal's end.

    SIGINT acts in a background job of a script too, which inherits it ignored: who sends it there means it.
    """
    return [
        number
        for number in ENDING
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let the signals of ENDING wait until the block ends; a second one acts at once.

    For calls that are short and must not be left half done: Ray's C++ part aborts the process when its
    Python part unwinds in the middle. Does nothing in other threads than the main one, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    held: list[int] = []

    def hold(number: int, _frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    for number in ENDING:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by C code, which Python cannot put back
                signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])
