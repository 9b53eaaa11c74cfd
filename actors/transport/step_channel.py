"""The step channel: a coordinator sends StepInput to every shard, rank 0 answers with StepOutput.

One ZeroMQ port at the coordinator (ROUTER), one socket to it at each shard (DEALER), owned by its step
loop. A message is two frames, a header (kind, epoch, rank) and a body; those of another epoch are dropped
at either end, and so is what cannot be read. Beside it each shard holds a `lifeline`: by its end, never by
a clock, the other side knows who is gone. A thread beats over it, so that a shard inside a long step is
slow and not silent.
"""

import logging
import os
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
from actors.transport.channel_keys import MemberKeys, ServerKeys
from actors.transport.lifeline import Lifeline, Lifelines
from actors.transport.locked_context import LockedContext
from actors.transport.silence import SilenceWatch
from kernels_integration.errors import UnavailableError

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""A shard says this often that it lives."""
_ORPHAN_CHECK_MS = 200
"""A waiting shard notices this late that its coordinator is gone."""

_HEADER = struct.Struct("<BIi")


class _Kind(IntEnum):
    HELLO = 1
    READY = 2
    OUTPUT = 3
    ERROR = 4
    INPUT = 5
    STOP = 6


class ShardFailure(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A shard cannot go on. `code` is a LatentrayError code."""

    rank: int
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class ShardGone:
    """The lifeline of a shard has ended: its process or its node is gone, or it has left."""

    rank: int


class ShardIdentity(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where a shard runs, for messages to people."""

    node: str
    pid: int

    def __str__(self) -> str:
        on_node = f" on node {self.node}" if self.node else ""
        return f"{on_node} (process {self.pid})"


_failure_decoder = msgspec.msgpack.Decoder(ShardFailure)
_identity_decoder = msgspec.msgpack.Decoder(ShardIdentity)


class CoordinatorEnd:
    """The coordinator's end. Not thread-safe: one loop owns it.

    host: where to listen, on free ports; `address` is what shards connect to. `receive` when `socket` or
    `lifelines` has something to read. tick_s: how often `tick` is called.
    keys: of who is let in; None: everybody, for tests on the loopback address.
    """

    def __init__(
        self,
        num_shards: int,
        *,
        host: str = "127.0.0.1",
        epoch: int = 0,
        tick_s: float = BEAT_S,
        clock: Callable[[], float] = time.monotonic,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
        keys: ServerKeys | None = None,
    ) -> None:
        self.num_shards = num_shards
        self.epoch = epoch
        self.num_malformed = 0
        """Messages that could not be read and were dropped."""
        self.num_refused = 0
        """Connections of strangers."""
        self._identities: dict[int, ShardIdentity] = {}
        self._ready: set[int] = set()
        self._silence: SilenceWatch[int] = SilenceWatch(tick_s, clock)
        self.lifelines = Lifelines(host, secret=b"" if keys is None else keys.lifeline)
        self._locked = None if keys is None else LockedContext(keys)
        if self._locked is not None:
            context = self._locked.context
        self.socket = (context or zmq.Context.instance()).socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a shard that connects again keeps its name
        _unbounded(self.socket)
        if self._locked is not None:
            self._locked.lock(self.socket)
        self.socket.bind(f"tcp://{host}:*")
        self.address = f"{self.socket.getsockopt_string(zmq.LAST_ENDPOINT)},{self.lifelines.port}"

    @property
    def is_ready(self) -> bool:
        """Every shard has loaded its model and waits for steps."""
        return len(self._ready) == self.num_shards

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def ready_ranks(self) -> frozenset[int]:
        return frozenset(self._ready)

    def name_of(self, rank: int) -> str:
        """'shard 1 on node 10.0.0.2 (process 77)'; less before the shard has said hello."""
        return f"shard {rank}{self._identities.get(rank, '')}"

    def begin_epoch(self, epoch: int) -> None:
        """Let the shards of this epoch go, wait for the next one's; what the old ones say is dropped."""
        self.stop_shards()
        for rank in range(self.num_shards):
            self._silence.forget(rank)
        self.epoch = epoch
        self._identities.clear()
        self._ready.clear()

    def send(self, step: StepInput) -> None:
        """Encode once, send the same bytes to every shard."""
        self._broadcast(_Kind.INPUT, messages.encode(step))

    def stop_shards(self) -> None:
        """Let every shard that is connected end its loop after the steps already sent."""
        self._broadcast(_Kind.STOP, b"")

    def receive(self) -> list[StepOutput | ShardFailure | ShardGone]:
        """What has arrived since the last call, in order; never waits. Then whoever is gone."""
        arrived: list[StepOutput | ShardFailure | ShardGone] = []
        signs = self.lifelines.read()  # before the messages, so that a shard's last words are not missed
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                name, header, body = frames
                self._take(name, header, body, arrived)
            except (ValueError, struct.error, msgspec.MsgspecError, RecursionError) as error:
                self.malformed(str(error))
        for epoch, rank in signs.beats:
            if epoch == self.epoch and rank in self._silence:
                self._silence.heard(rank)
        arrived += [ShardGone(rank) for epoch, rank in signs.closed if self._is_ours(epoch, rank)]
        return arrived

    def malformed(self, why: str) -> None:
        """Count and log a message that is dropped, here or by who received it."""
        self.num_malformed += 1
        logger.warning("step channel: a message was dropped: %s", why)

    def tick(self) -> None:
        """The coordinator is here: called every tick_s."""
        self._silence.tick()
        self.num_refused = self.lifelines.num_refused
        if self._locked is not None:
            self.num_refused += self._locked.num_refused()

    def silent(self, limit_s: float) -> list[int]:
        """Ranks that have connected and were not heard from for longer than limit_s."""
        return self._silence.silent(limit_s)

    def close(self) -> None:
        self.lifelines.close()
        if self._locked is None:
            self.socket.close(linger=500)
        else:
            self._locked.close(self.socket, linger_ms=500)

    def _is_ours(self, epoch: int, rank: int) -> bool:
        return epoch == self.epoch and 0 <= rank < self.num_shards

    def _take(
        self, name: bytes, header: bytes, body: bytes, arrived: list[StepOutput | ShardFailure | ShardGone]
    ) -> None:
        kind, epoch, rank = _HEADER.unpack(header)
        if not 0 <= rank < self.num_shards:
            raise ValueError(f"its rank is {rank}, this group has {self.num_shards} shards")
        if epoch != self.epoch:
            return
        if name != _steps_name(epoch, rank):
            raise ValueError(f"it comes from {name!r} in the name of rank {rank}")
        if kind == _Kind.HELLO:
            self._identities[rank] = _identity_decoder.decode(body)
        elif kind == _Kind.READY:
            self._ready.add(rank)
        elif kind == _Kind.OUTPUT:
            arrived.append(messages.decode_output(body))
        elif kind == _Kind.ERROR:
            failure = _failure_decoder.decode(body)
            if failure.rank != rank:
                raise ValueError(f"rank {rank} reports the failure of rank {failure.rank}")
            arrived.append(failure)
        else:
            raise ValueError(f"its kind is {kind}")
        self._silence.heard(rank)

    def _broadcast(self, kind: _Kind, body: bytes) -> None:
        header = _HEADER.pack(kind, self.epoch, -1)
        for rank in self._silence.peers():
            self.socket.send_multipart((_steps_name(self.epoch, rank), header, body))


class ShardEnd:
    """A shard's end. `receive`, `report`, `ready` and `fail` belong to the step loop's thread.

    address: the coordinator's `address`. node: where this shard runs, for messages to people.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        *,
        epoch: int = 0,
        node: str = "",
        beat_s: float = BEAT_S,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
        keys: MemberKeys | None = None,
    ) -> None:
        self.rank = rank
        self.epoch = epoch
        steps, _, lifeline_port = address.rpartition(",")
        self._coordinator = steps
        host = steps.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        self._lifeline = Lifeline(
            (host, int(lifeline_port)),
            epoch=epoch,
            rank=rank,
            secret=b"" if keys is None else keys.lifeline,
        )
        self._socket = (context or zmq.Context.instance()).socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, _steps_name(epoch, rank))
        _unbounded(self._socket)
        if keys is not None:
            keys.lock(self._socket)
        self._socket.connect(steps)
        self._send(_Kind.HELLO, msgspec.msgpack.encode(ShardIdentity(node=node, pid=os.getpid())))
        self._closing = threading.Event()
        self._is_orphan = threading.Event()
        self._beats = threading.Thread(
            target=self._beat, args=(beat_s,), name=f"shard-{rank}-beats", daemon=True
        )
        self._beats.start()

    def ready(self) -> None:
        """The model is loaded: the next message may be a step."""
        self._send(_Kind.READY)

    @property
    def has_message(self) -> bool:
        """Whether `receive` finds one at once, or the coordinator is gone, which it tells."""
        return bool(self._socket.poll(0)) or self._is_orphan.is_set()

    def receive(self) -> StepInput | None:
        """The next step; None when the coordinator ends the loop. Waits as long as it takes.

        Errors: UnavailableError when the coordinator is gone.
        """
        while True:
            while not self._socket.poll(_ORPHAN_CHECK_MS):
                if self._is_orphan.is_set():
                    raise UnavailableError(
                        f"the coordinator at {self._coordinator} is gone: its connection was closed"
                    )
            try:
                header, body = self._socket.recv_multipart()
                kind, epoch, _ = _HEADER.unpack(header)
                if epoch != self.epoch:
                    continue
                if kind == _Kind.STOP:
                    return None
                if kind == _Kind.INPUT:
                    return messages.decode_input(body)
            except (ValueError, struct.error, msgspec.MsgspecError, RecursionError) as error:
                logger.warning("step channel: a message was dropped: %s", error)

    def report(self, output: StepOutput) -> None:
        self._send(_Kind.OUTPUT, messages.encode(output))

    def fail(self, code: str, text: str) -> None:
        """Tell the coordinator why this shard ends."""
        failure = ShardFailure(rank=self.rank, code=code, text=text)
        self._send(_Kind.ERROR, msgspec.msgpack.encode(failure))

    def close(self) -> None:
        self._closing.set()
        self._lifeline.shut()
        self._beats.join()
        self._lifeline.close()
        self._socket.close(linger=300)

    def _beat(self, beat_s: float) -> None:
        if self._lifeline.beat_until_lost(beat_s, self._closing.is_set):
            self._is_orphan.set()

    def _send(self, kind: _Kind, body: bytes = b"") -> None:
        self._socket.send_multipart((_HEADER.pack(kind, self.epoch, self.rank), body))


def _steps_name(epoch: int, rank: int) -> bytes:
    return b"%d.%d.steps" % (epoch, rank)


def _unbounded(socket: "zmq.Socket[bytes]") -> None:
    """Without a high-water mark: ZeroMQ would drop messages of a ROUTER whose peer is behind."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
