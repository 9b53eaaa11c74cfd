"""The step channel: a coordinator sends StepInput to every shard, rank 0 answers with StepOutput.

One ZeroMQ port at the coordinator (ROUTER). A shard has two sockets to it (DEALER): one belongs to
its step loop, the other to a thread that only beats, so that a shard inside a long step is slow and
not dead. A message is two frames, a header (kind, epoch, rank) and a body; those of another epoch
are dropped at either end.
"""

import logging
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import zmq

from actors import messages
from actors.messages import StepInput, StepOutput

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""A shard says this often that it lives."""
SILENCE_S = 3.0
"""A shard not heard for so long is dead."""

_HEADER = struct.Struct("<BIi")


class _Kind(IntEnum):
    HELLO = 1
    READY = 2
    BEAT = 3
    OUTPUT = 4
    ERROR = 5
    INPUT = 6
    STOP = 7


class ShardFailure(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A shard cannot go on. `code` is a LatentrayError code."""

    rank: int
    code: str
    text: str


_failure_decoder = msgspec.msgpack.Decoder(ShardFailure)


@dataclass(slots=True)
class _Peer:
    heard_at_s: float
    is_ready: bool = False


class CoordinatorEnd:
    """The coordinator's end. Not thread-safe: one loop owns it.

    bind: "tcp://HOST:*" takes a free port; `address` is what shards connect to. A shard that gives up
    says so in a ShardFailure; one that dies falls silent.
    """

    def __init__(
        self,
        num_shards: int,
        *,
        bind: str = "tcp://127.0.0.1:*",
        epoch: int = 0,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        self.num_shards = num_shards
        self.epoch = epoch
        self._silence_s = silence_s
        self._clock = clock
        self._peers: dict[int, _Peer] = {}
        self.socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a shard that connects again keeps its name
        _unbounded(self.socket)
        self.socket.bind(bind)
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def is_ready(self) -> bool:
        """Every shard has loaded its model and waits for steps."""
        return self.num_ready == self.num_shards

    @property
    def num_ready(self) -> int:
        return sum(peer.is_ready for peer in self._peers.values())

    def send(self, step: StepInput) -> None:
        """Encode once, send the same bytes to every shard."""
        self._broadcast(_Kind.INPUT, messages.encode(step))

    def stop_shards(self) -> None:
        """Let every shard that is connected end its loop after the steps already sent."""
        self._broadcast(_Kind.STOP, b"")

    def receive(self) -> list[StepOutput | ShardFailure]:
        """What has arrived since the last call, in order; never waits."""
        arrived: list[StepOutput | ShardFailure] = []
        while True:
            try:
                _, header, body = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return arrived
            except ValueError:
                logger.warning("step channel: a message without three frames was ignored")
                continue
            self._take(header, body, arrived)

    def silent(self) -> list[int]:
        """Ranks that have connected and were not heard from for longer than silence_s."""
        now = self._clock()
        return [rank for rank, peer in self._peers.items() if now - peer.heard_at_s > self._silence_s]

    def close(self) -> None:
        self.socket.close(linger=500)

    def _take(self, header: bytes, body: bytes, arrived: list[StepOutput | ShardFailure]) -> None:
        if len(header) != _HEADER.size:
            logger.warning("step channel: a message with a foreign header was ignored")
            return
        kind, epoch, rank = _HEADER.unpack(header)
        if epoch != self.epoch or not 0 <= rank < self.num_shards:
            return
        peer = self._peers.get(rank)
        if peer is None:
            if kind == _Kind.BEAT:
                return  # the two sockets connect in any order; a shard exists from its HELLO on
            peer = self._peers[rank] = _Peer(self._clock())
        peer.heard_at_s = self._clock()
        if kind == _Kind.READY:
            peer.is_ready = True
        elif kind == _Kind.OUTPUT:
            arrived.append(messages.decode_output(body))
        elif kind == _Kind.ERROR:
            arrived.append(_failure_decoder.decode(body))

    def _broadcast(self, kind: _Kind, body: bytes) -> None:
        header = _HEADER.pack(kind, self.epoch, -1)
        for rank in self._peers:
            self.socket.send_multipart((_steps_name(self.epoch, rank), header, body))


class ShardEnd:
    """A shard's end. `receive`, `report`, `ready` and `fail` belong to the step loop's thread."""

    def __init__(
        self,
        address: str,
        rank: int,
        *,
        epoch: int = 0,
        beat_s: float = BEAT_S,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        self._context = context or zmq.Context.instance()
        self._socket = self._connect(address, _steps_name(epoch, rank))
        self._send(_Kind.HELLO)
        self._closing = threading.Event()
        self._beats = threading.Thread(
            target=self._beat, args=(address, beat_s), name=f"shard-{rank}-beats", daemon=True
        )
        self._beats.start()

    def ready(self) -> None:
        """The model is loaded: the next message may be a step."""
        self._send(_Kind.READY)

    def receive(self) -> StepInput | None:
        """The next step; None when the coordinator ends the loop. Waits as long as it takes."""
        while True:
            header, body = self._socket.recv_multipart()
            kind, epoch, _ = _HEADER.unpack(header)
            if epoch != self.epoch:
                continue
            if kind == _Kind.STOP:
                return None
            if kind == _Kind.INPUT:
                return messages.decode_input(body)

    def report(self, output: StepOutput) -> None:
        self._send(_Kind.OUTPUT, messages.encode(output))

    def fail(self, code: str, text: str) -> None:
        """Tell the coordinator why this shard ends."""
        failure = ShardFailure(rank=self.rank, code=code, text=text)
        self._send(_Kind.ERROR, msgspec.msgpack.encode(failure))

    def close(self) -> None:
        self._closing.set()
        self._beats.join()
        self._socket.close(linger=300)

    def _beat(self, address: str, beat_s: float) -> None:
        socket = self._connect(address, b"%d.%d.beats" % (self.epoch, self.rank))
        header = _HEADER.pack(_Kind.BEAT, self.epoch, self.rank)
        while not self._closing.is_set():
            socket.send_multipart((header, b""))
            self._closing.wait(beat_s)
        socket.close(linger=0)

    def _connect(self, address: str, name: bytes) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, name)
        _unbounded(socket)
        socket.connect(address)
        return socket

    def _send(self, kind: _Kind, body: bytes = b"") -> None:
        self._socket.send_multipart((_HEADER.pack(kind, self.epoch, self.rank), body))


def _steps_name(epoch: int, rank: int) -> bytes:
    return b"%d.%d.steps" % (epoch, rank)


def _unbounded(socket: "zmq.Socket[bytes]") -> None:
    """Without a high-water mark: ZeroMQ would drop messages of a ROUTER whose peer is behind."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
