"""ZeroMQ sockets that let in who has the keys, and count who has not."""

import contextlib
import logging
import threading
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from actors.transport.channel_keys import ServerKeys

logger = logging.getLogger(__name__)

_DOMAIN = "group"
_REFUSALS = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class LockedContext:
    """A ZeroMQ context of its own, with one listening socket that `lock` is called for.

    CURVE alone would let in everybody who knows the server's public key: an authenticator, which ZeroMQ wants
    one of in a context, asks for the members' key too.
    """

    def __init__(self, keys: ServerKeys) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self._keys = keys
        self._monitor: zmq.Socket[bytes] | None = None
        self._num_refused = 0
        asked = self.context.socket(zmq.REP)
        asked.bind("inproc://zeromq.zap.01")
        # pyzmq's authenticators need an event loop, and a pipe to be stopped by.
        threading.Thread(target=self._authenticate, args=(asked,), name="key-check", daemon=True).start()

    def _authenticate(self, asked: "zmq.Socket[bytes]") -> None:
        """Answer ZeroMQ until the context ends (ZeroMQ RFC 27, ZAP 1.0)."""
        with asked, contextlib.suppress(zmq.ContextTerminated):
            while True:
                version, number, _, _, _, mechanism, *credentials = asked.recv_multipart()
                is_member = mechanism == b"CURVE" and credentials == [z85.decode(self._keys.member)]
                status = (b"200", b"OK") if is_member else (b"400", b"no member")
                asked.send_multipart((version, number, *status, b"", b""))

    def lock(self, socket: "zmq.Socket[bytes]") -> None:
        """Before it listens."""
        socket.curve_server = True
        socket.curve_publickey = self._keys.public
        socket.curve_secretkey = self._keys.secret
        socket.zap_domain = _DOMAIN.encode()
        address = f"inproc://refusals-{id(socket)}"
        socket.monitor(address, _REFUSALS)
        self._monitor = self.context.socket(zmq.PAIR)
        # A full queue would stop ZeroMQ's own thread.
        self._monitor.setsockopt(zmq.RCVHWM, 0)
        self._monitor.connect(address)

    def num_refused(self) -> int:
        """Connections that were refused so far. Called now and then by the socket's thread."""
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
            self._num_refused += 1
            # The 1st, 2nd, 4th...: a flood must not fill the log.
            if self._num_refused & (self._num_refused - 1) == 0:
                logger.warning(
                    "a connection to %s without this group's keys was refused (%d so far)",
                    event["endpoint"].decode(errors="replace"),
                    self._num_refused,
                )
        return self._num_refused

    def close(self, socket: "zmq.Socket[bytes]", *, linger_ms: int) -> None:
        """End the socket and the context; what is on its way has linger_ms."""
        socket.disable_monitor()
        if self._monitor is not None:
            self._monitor.close(linger=0)
            self._monitor = None
        socket.close(linger=linger_ms)
        self.context.term()
