"""A connection whose end is a process's end: TCP from each shard to its coordinator, open for life.

The kernel closes the sockets of a process however it dies, so either side knows at once, where a clock
would have to guess; and it answers keep-alive probes for a process that is stopped or starved, which a
clock would take for dead. A node that cannot be reached any more fails the probes within UNREACHABLE_S.
A shard also writes a byte now and then, so that a silent process can be told from a lively one.
"""

import contextlib
import select
import selectors
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from actors.transport.channel_keys import PROOF_BYTES, is_proven, proof

_GREETING = struct.Struct("<4sIi")
_MAGIC = b"LRL2"
_MAX_STRANGERS = 256
"""Connections that have yet to greet; the oldest is closed for another one."""
_BEAT = b"\0"
_PROBES = 3
UNREACHABLE_S = 1 + _PROBES
"""A peer's node that answers nothing for so long is gone: one idle second, then a probe a second."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What the lifelines told since the last look, as (epoch, rank)."""

    beats: list[tuple[int, int]]
    closed: list[tuple[int, int]]


class Lifelines:
    """The coordinator's side: any number of shards. Pollable by `fileno`; one thread owns it."""

    def __init__(self, host: str, *, secret: bytes = b"") -> None:
        """secret: what greetings are proven with."""
        self._secret = secret
        self.num_refused = 0
        """Connections that were closed for their greetings."""
        self._listener = socket.create_server((host, 0), family=_family(host))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._greetings: dict[socket.socket, bytes] = {}
        """What has arrived of a connection's greeting."""
        self._owners: dict[socket.socket, tuple[int, int]] = {}

    def fileno(self) -> int:
        """Readable when `read` has something to tell."""
        # epoll and kqueue are descriptors that can be polled themselves
        return self._selector.fileno()

    def read(self) -> Signs:
        """Whoever gave a sign of life or ended since the last call; never waits."""
        signs = Signs([], [])
        for key, _ in self._selector.select(0):
            line = key.fileobj
            assert isinstance(line, socket.socket)
            if line is self._listener:
                self._accept()
            elif line in self._greetings or line in self._owners:  # not closed for another one meanwhile
                self._read(line, signs)
        return signs

    def close(self) -> None:
        for line in (*self._greetings, *self._owners, self._listener):
            line.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it may have left already
            line, _ = self._listener.accept()
            line.setblocking(False)
            probe(line)
            if len(self._greetings) >= _MAX_STRANGERS:
                self._refuse(next(iter(self._greetings)))
            self._greetings[line] = b""
            self._selector.register(line, selectors.EVENT_READ)

    def _read(self, line: socket.socket, signs: Signs) -> None:
        try:
            data = line.recv(4096)
        except BlockingIOError:
            return
        except OSError:  # reset, or its node cannot be reached
            data = b""
        if data and line in self._greetings:
            data = self._greet(line, self._greetings[line] + data)
        if not data:
            self._end(line, signs)
        elif line in self._owners:
            signs.beats.append(self._owners[line])

    def _greet(self, line: socket.socket, greeting: bytes) -> bytes:
        """Note who has connected. Nothing is returned for a stranger, nor for who says to be somebody that is
        connected already: a greeting that was overheard is good for nothing.
        """
        if len(greeting) < _GREETING.size + PROOF_BYTES and _MAGIC.startswith(greeting[: len(_MAGIC)]):
            self._greetings[line] = greeting
            return greeting
        greeting = greeting.ljust(_GREETING.size + PROOF_BYTES, b"\0")
        told, given = greeting[: _GREETING.size], greeting[_GREETING.size :][:PROOF_BYTES]
        magic, epoch, rank = _GREETING.unpack(told)
        known = magic == _MAGIC and is_proven(self._secret, told, given)
        if not known or (epoch, rank) in self._owners.values():
            self.num_refused += 1
            return b""
        del self._greetings[line]
        self._owners[line] = (epoch, rank)
        return greeting

    def _refuse(self, line: socket.socket) -> None:
        self.num_refused += 1
        self._end(line, Signs([], []))

    def _end(self, line: socket.socket, signs: Signs) -> None:
        self._selector.unregister(line)
        line.close()
        self._greetings.pop(line, None)
        if (owner := self._owners.pop(line, None)) is not None:
            signs.closed.append(owner)


class Lifeline:
    """A shard's side. `beat_until_lost` belongs to a thread of its own."""

    def __init__(self, address: tuple[str, int], *, epoch: int, rank: int, secret: bytes = b"") -> None:
        self._line = socket.create_connection(address, timeout=10)
        probe(self._line)
        greeting = _GREETING.pack(_MAGIC, epoch, rank)
        self._line.sendall(greeting + proof(secret, greeting))

    def beat_until_lost(self, beat_s: float, is_closing: Callable[[], bool]) -> bool:
        """Beat until is_closing (looked at once a beat); True when the coordinator ended instead."""
        while not is_closing():
            try:
                self._line.sendall(_BEAT)
                if select.select([self._line], [], [], beat_s)[0] and not self._line.recv(4096):
                    return not is_closing()
            except (OSError, ValueError):  # reset; or closed here meanwhile
                return not is_closing()
        return False

    def shut(self) -> None:
        """End `beat_until_lost` at once; any thread may call it."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._line.close()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def probe(line: socket.socket) -> None:
    """Let the kernel find out whether the other node is still there."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 1),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", UNREACHABLE_S * 1000),  # of what was sent and not acknowledged, Linux
    ):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
