"""The request channel: front ends submit and abort requests, the coordinator sends their updates.

ZeroMQ: a DEALER per front end, one ROUTER at the coordinator. Both ends beat; a coordinator's beat carries
the group's health and numbers. A front end whose connection is closed is gone, which the next beat to it
shows, and its requests are ended; so are those of one that is connected and silent for `silence_s`.
"""

import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from actors.requests import Request, RequestFailed, RequestUpdate, SequenceKey
from actors.stats import GroupStats
from actors.transport.channel_keys import ServerKeys
from actors.transport.locked_context import LockedContext
from actors.transport.silence import SilenceWatch
from kernels_integration.errors import shown

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""Both ends say this often that they live."""
CLIENT_SILENCE_S = 60.0
"""A front end that is stopped, starved or busy in one long call is slow and not gone."""

UNREACHABLE_MS = 4000
"""A node that acknowledges nothing for so long has lost its connection."""
MAX_MESSAGE_BYTES = 256 * 2**20
"""A sender of larger messages is cut off before they are in memory."""

ClientId = bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front end lives. The first one opens its stream of GroupBeats."""


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A front end leaves; its requests are aborted."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """One sequence. The request is decoded by itself, so that one that cannot be read fails under its key."""

    key: SequenceKey
    request: bytes
    """msgpack."""

    @classmethod
    def of(cls, request: Request) -> "Submit":
        return cls(request.key, encode(request))


class Abort(msgspec.Struct, frozen=True, tag=True):
    keys: tuple[SequenceKey, ...]


class Updates(msgspec.Struct, frozen=True, tag=True):
    """What happened to a front end's requests in one step. A failure is its request's last word."""

    updates: tuple[RequestUpdate, ...] = ()
    failures: tuple[RequestFailed, ...] = ()


class GroupBeat(msgspec.Struct, frozen=True, tag=True):
    """The coordinator lives. `healthy`: a token can be produced now; else `message` says why not."""

    healthy: bool
    message: str
    stats: GroupStats
    phase: str = "serving"
    """starting, serving, recovering, failed or stopping: see `actors.coordinator.group_state`."""


ToCoordinator = Hello | Goodbye | Submit | Abort
ToClient = Updates | GroupBeat

encode = msgspec.msgpack.Encoder().encode
_to_coordinator = msgspec.msgpack.Decoder(ToCoordinator)
_to_client = msgspec.msgpack.Decoder(ToClient)
_to_request = msgspec.msgpack.Decoder(Request)


def decode_to_client(data: bytes) -> ToClient:
    return _to_client.decode(data)


def decode_request(message: Submit) -> Request:
    """Errors: any, of bytes that are no request: ValueError, RecursionError, LatentrayError."""
    request = _to_request.decode(message.request)
    if request.key != message.key:
        raise ValueError(f"the request says that it is {request.key}, its message {message.key}")
    return request


class CoordinatorEnd:
    """The coordinator's end. Not thread-safe: one loop owns it.

    num_ignored: messages that could not be read. They end nothing but themselves.
    """

    def __init__(
        self,
        *,
        bind: str = "tcp://127.0.0.1:*",
        silence_s: float = CLIENT_SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
        keys: ServerKeys | None = None,
    ) -> None:
        """keys: of who is let in; None: everybody, for tests on the loopback address."""
        self.num_ignored = 0
        self.num_refused = 0
        """Connections of strangers."""
        self._locked = None if keys is None else LockedContext(keys)
        if self._locked is not None:
            context = self._locked.context
        self._unreachable: set[ClientId] = set()
        self._silence_s = silence_s
        self._silence: SilenceWatch[ClientId] = SilenceWatch(BEAT_S, clock)
        self.socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        # Tokens are never dropped because a front end is behind; its silence ends its requests.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self.socket.setsockopt(zmq.TCP_MAXRT, UNREACHABLE_MS)
        # Sending to a front end that is gone is an error: the only word of it that a ROUTER gives.
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A front end that comes back over a new connection, before the end of the old one is noticed.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._locked is not None:
            self._locked.lock(self.socket)
        self.socket.bind(bind)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def num_clients(self) -> int:
        """Front ends that are connected."""
        return len(self._silence.peers())

    def receive(self) -> list[tuple[ClientId, ToCoordinator]]:
        """What has arrived since the last call, in order; never waits. Of Hellos only a client's first."""
        arrived: list[tuple[ClientId, ToCoordinator]] = []
        while True:
            try:
                client, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return arrived
            try:
                message = _to_coordinator.decode(b"".join(frames))
            except Exception as error:  # RecursionError, and whatever else the decoder makes of hostile bytes
                self._ignore(error)
                continue
            if isinstance(message, Goodbye):
                self._silence.forget(client)
            elif not self._silence.heard(client) and isinstance(message, Hello):
                continue
            arrived.append((client, message))

    def take_lost(self) -> list[ClientId]:
        """Forget and return the clients whose connection is closed, or that were silent for silence_s."""
        self._silence.tick()
        if self._locked is not None:
            self.num_refused = self._locked.num_refused()
        lost = self._unreachable.union(self._silence.silent(self._silence_s))
        self._unreachable = set()
        for client in lost:
            self._silence.forget(client)
        return list(lost)

    def send(
        self,
        client: ClientId,
        *,
        updates: Sequence[RequestUpdate] = (),
        failures: Sequence[RequestFailed] = (),
    ) -> None:
        self._send(client, encode(Updates(tuple(updates), tuple(failures))))

    def beat(self, beat: GroupBeat, client: ClientId | None = None) -> None:
        """Tell one client, or every one that is connected, how the group is."""
        data = encode(beat)
        for receiver in self._silence.peers() if client is None else (client,):
            self._send(receiver, data)

    def close(self) -> None:
        if self._locked is None:
            self.socket.close(linger=500)
        else:
            self._locked.close(self.socket, linger_ms=500)

    def _ignore(self, error: Exception) -> None:
        self.num_ignored += 1
        # The 1st, 2nd, 4th...: a flood must not fill the log.
        if self.num_ignored & (self.num_ignored - 1) == 0:
            logger.warning(
                "request channel: a message was ignored (%d so far): %s: %s",
                self.num_ignored,
                type(error).__name__,
                shown(str(error)),
            )

    def _send(self, client: ClientId, data: bytes) -> None:
        try:
            self.socket.send_multipart((client, data))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._unreachable.add(client)
