"""A TCP proxy on the loopback address that cuts connections in the middle of what they carry."""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class CuttingProxy:
    """Connections to it go to `port`; the first num_cuts on which the server says `when` are cut then."""

    def __init__(self, port: int, *, when: bytes, num_cuts: int) -> None:
        self.num_cut = 0
        self._port = port
        self._when = when
        self._num_cuts = num_cuts
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for args in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if is_answer and self.num_cut < self._num_cuts and self._when in data:
                    self.num_cut += 1
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
