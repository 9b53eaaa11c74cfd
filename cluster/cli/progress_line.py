"""What is waited for, on stderr: one line that is rewritten at a terminal, a few lines in a log."""

import re
import shutil
import sys
import time
import unicodedata
from typing import TextIO

_CHANGING = re.compile(r"(: [^:]+ of [^:]+)? \(\d+ s\)")
_REPEAT_S = 10.0
"""In a log, a message of which only seconds and bytes have changed is repeated this often."""


class ProgressLine:
    """Call it with a message; `close` it before anything else is printed."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._start_s = self._shown_s = time.monotonic()
        self._shown = ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start_s

    def __call__(self, message: str) -> None:
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1  # a full line would wrap, and then stay
            self._stream.write(f"\r\x1b[K{_cut(f'[{self.elapsed_s:5.1f} s] {message}', width)}")
            self._stream.flush()
            return
        text, now_s = _CHANGING.sub("", message), time.monotonic()
        if text != self._shown or now_s - self._shown_s >= _REPEAT_S:
            self._stream.write(f"[{self.elapsed_s:5.1f} s] {message}\n")
            self._stream.flush()
            self._shown, self._shown_s = text, now_s

    def close(self) -> None:
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def _cut(text: str, width: int) -> str:
    """The beginning of a text, in one line of so many columns; wide characters take two."""
    columns = 0
    for position, character in enumerate(text := " ".join(text.splitlines())):
        columns += 1 + (unicodedata.east_asian_width(character) in "WF")
        if columns > width:
            return text[:position]
    return text
