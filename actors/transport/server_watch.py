"""Whether a server still listens: a TCP connection to it, held open only to see it end."""

import contextlib
import select
import socket
import time
from collections.abc import Callable

from actors.transport.lifeline import UNREACHABLE_S, probe

_LOOK_S = 0.2


class ServerWatch:
    """Of one server; a thread of its own calls `wait_lost`.

    patience_s: for how long connections may be refused before the server counts as lost: longer than 0 where
    it may be started again. One that does not answer at all is given UNREACHABLE_S at least.
    """

    def __init__(self, address: tuple[str, int], *, patience_s: float) -> None:
        self._address = address
        self._patience_s = patience_s
        self._line: socket.socket | None = None
        self._away_since_s: float | None = None

    def wait_lost(self, is_over: Callable[[], bool]) -> bool:
        """True when the server is lost; False as soon as `is_over`, which is asked every _LOOK_S."""
        try:
            while not is_over():
                if self._line is None:
                    if self._is_lost():
                        return True
                elif select.select([self._line], [], [], _LOOK_S)[0]:
                    self._read(self._line)
        finally:
            self._drop()
        return False

    def _is_lost(self) -> bool:
        """Connect again. A server closes a connection that says nothing, too: only a refusal tells."""
        try:
            self._line = socket.create_connection(self._address, timeout=1)
        except OSError as error:
            now_s = time.monotonic()
            if self._away_since_s is None:
                self._away_since_s = now_s
            elif now_s - self._away_since_s >= self._limit_s(error):
                return True
            time.sleep(_LOOK_S)
        else:
            probe(self._line)
            self._away_since_s = None
        return False

    def _limit_s(self, error: OSError) -> float:
        is_refused = isinstance(error, ConnectionRefusedError)
        return self._patience_s if is_refused else max(self._patience_s, UNREACHABLE_S)

    def _read(self, line: socket.socket) -> None:
        try:
            data = line.recv(4096)
        except OSError:
            data = b""
        if not data:
            self._drop()

    def _drop(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.close()
            self._line = None
