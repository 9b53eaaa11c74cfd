"""A front end's connection to one coordinator: submit, deliver, abort, health. No torch, no Ray."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from actors.requests import Request, SequenceKey
from actors.stats import GroupStats
from actors.transport import request_channel
from actors.transport.channel_keys import MemberKeys
from actors.transport.request_channel import Abort, Goodbye, GroupBeat, Hello, Submit, Updates
from actors.transport.silence import SilenceWatch
from cluster.answering.group import Deliver
from cluster.errors import from_code
from kernels_integration.errors import LetGoError, UnavailableError

logger = logging.getLogger(__name__)

SILENCE_S = 3.0
"""A coordinator not heard for so long gets no new requests."""
GIVE_UP_S = 60.0
"""One that lives, as its connection shows, and was not heard for so long loses those that it has."""
_COORDINATOR = "coordinator"
"""The one peer whose silence is watched, whoever it is."""
_LAST_WORDS_S = 0.05
"""For what a coordinator said before it went to be read."""


class GroupClient:
    """A Group of one event loop, over sockets.

    `request_address` comes from GroupHandle. `connect` (or `async with`) starts it in the running loop.
    A coordinator that is silent is slow; one whose connection is closed is dead, and known to be at once.
    A sequence that it ends by itself, for whatever reason, it ends at the coordinator too: nothing runs
    without a reader.
    """

    def __init__(
        self,
        request_address: str,
        *,
        keys: MemberKeys | None = None,
        silence_s: float = SILENCE_S,
        give_up_s: float = GIVE_UP_S,
        recovery_s: float = 0.0,
    ) -> None:
        """keys: of the group; None: its coordinator lets everybody in, in tests.

        recovery_s: how long after the loss of the coordinator its successor may be waited for.
        """
        self.request_address = request_address
        self._keys = keys
        self._recovery_s = recovery_s
        self._is_lost = False
        """The connection was closed, and no coordinator has been heard since."""
        self._lost_at_s = 0.0
        self._is_over = False
        """The group has failed for good."""
        self._silence_s = silence_s
        self._silence: SilenceWatch[str] = SilenceWatch(request_channel.BEAT_S)
        self._give_up_s = give_up_s
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._live: dict[SequenceKey, Deliver] = {}
        self._beat: GroupBeat | None = None
        self._trouble = ""
        """Why the coordinator is taken for silent or gone; "" while it is heard."""
        self._first_beat = asyncio.Event()

    @property
    def stats(self) -> GroupStats | None:
        """The group's numbers as of its last heartbeat, without load when it is gone; None before one."""
        if self._beat is None or not (self._is_lost or self._is_over):
            return self._beat.stats if self._beat is not None else None
        return msgspec.structs.replace(self._beat.stats, running=0, waiting=0, num_used_blocks=0)

    @property
    def healthy(self) -> bool:
        """The coordinator was heard within the last seconds and all of its shards live."""
        return self._beat is not None and self._beat.healthy and not self._trouble

    @property
    def is_recovering(self) -> bool:
        """As Group.is_recovering: it starts lost shards again, or its coordinator may have a successor."""
        if self._is_over:
            return False
        if self._is_lost:
            return time.monotonic() - self._lost_at_s < self._recovery_s
        return self._beat is not None and self._beat.phase == "recovering"

    @property
    def message(self) -> str:
        """Why the group is not healthy, in words."""
        if self._beat is None and not self._is_over:
            return f"no heartbeat from the coordinator at {self.request_address} yet"
        return self._trouble or ("" if self._beat is None else self._beat.message)

    async def connect(self, timeout_s: float = 10.0) -> None:
        """Wait for the coordinator's first heartbeat.

        Errors: UnavailableError after timeout_s.
        """
        if self._socket is None:
            socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().bytes)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 500)
            socket.setsockopt(zmq.TCP_MAXRT, request_channel.UNREACHABLE_MS)
            monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            if self._keys is not None:
                self._keys.lock(socket)
            socket.connect(self.request_address)
            self._socket = socket
            self._tasks = [
                asyncio.create_task(self._receive(socket), name="group-client-receive"),
                asyncio.create_task(self._keep_alive(), name="group-client-beat"),
                asyncio.create_task(self._watch(monitor), name="group-client-watch"),
            ]
        try:
            await asyncio.wait_for(self._first_beat.wait(), timeout_s)
        except TimeoutError:
            raise UnavailableError(
                f"the coordinator at {self.request_address} did not answer within {timeout_s:g} s; "
                "check that the group runs and that its port can be reached"
            ) from None

    def submit(self, request: Request, deliver: Deliver) -> None:
        """As Group.submit; the coordinator's refusal is delivered. Errors: UnavailableError."""
        if not self.healthy:
            raise UnavailableError(self.message)
        self._send(Submit.of(request))
        self._live[request.key] = deliver

    def move(self, request_address: str) -> None:
        """The coordinator has a successor there. What ran on the old one has ended, or ends now.

        An operator restarts a group that was lost for good, too.
        """
        self._is_over = False
        if self._socket is None:  # it has yet to connect, or was closed
            self.request_address = request_address
            return
        self._fail(f"the coordinator at {self.request_address} has a successor")
        self._socket.disconnect(self.request_address)
        self.request_address = request_address
        self._socket.connect(request_address)
        # Whether or not the end of the old connection has been noticed yet.
        self._is_lost, self._lost_at_s = True, time.monotonic()
        self._trouble = f"no heartbeat from the coordinator at {request_address} yet"
        self._silence.heard(_COORDINATOR)
        self._send(Hello())

    def lose(self, reason: str) -> None:
        """No successor will come by itself; what the coordinator still says, if it lives, means nothing."""
        self._is_over, self._trouble = True, reason
        self._fail(reason)

    def let_go(self, reason: str) -> None:
        """End every sequence that runs with LetGoError: its front end lets it go on elsewhere."""
        self._end_live(LetGoError(reason))

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        """As Group.abort."""
        live = tuple(key for key in keys if self._live.pop(key, None) is not None)
        if live:
            self._send(Abort(live))

    async def current_stats(self) -> GroupStats:
        """Numbers as of now: the coordinator greets a new client with them. Errors: UnavailableError."""
        return await current_stats(self.request_address, self._keys)

    async def close(self) -> None:
        """Leave the group; sequences that run end with UnavailableError, and at the coordinator."""
        if self._socket is None:
            return
        self._fail("the connection to the group was closed")
        self._send(Goodbye())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.disable_monitor()
        self._socket.close()
        self._socket = None

    async def __aenter__(self) -> "GroupClient":
        await self.connect()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            data = await socket.recv()
            try:
                message = request_channel.decode_to_client(data)
            except Exception:
                logger.exception("a message of the coordinator could not be read")
                continue
            self._silence.heard(_COORDINATOR)
            self._is_lost = False
            if not self._is_over:
                self._trouble = ""
            if isinstance(message, Updates):
                self._dispatch(message)
            else:
                self._beat = message
                self._first_beat.set()

    def _dispatch(self, message: Updates) -> None:
        for update in message.updates:
            if (deliver := self._live.get(update.key)) is not None:
                if update.finish_reason is not None:
                    del self._live[update.key]
                deliver(update)
        for failed in message.failures:
            if (deliver := self._live.pop(failed.key, None)) is not None:
                deliver(from_code(failed.code, failed.message))

    async def _keep_alive(self) -> None:
        while True:
            self._send(Hello())
            await asyncio.sleep(request_channel.BEAT_S)
            self._silence.tick()
            if self._silence.silent(self._silence_s) and not self._is_over:
                silence_s = self._silence.silence_s(_COORDINATOR)
                self._trouble = (
                    f"no heartbeat from the coordinator at {self.request_address} for {silence_s:.1f} s"
                )
                if silence_s > self._give_up_s:
                    self._fail(self._trouble)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """A connection that is closed, by the coordinator's end, its process's or its node's."""
        with monitor:
            while True:
                event = await recv_monitor_message(monitor)
                await asyncio.sleep(_LAST_WORDS_S)
                if event["endpoint"].decode() != self.request_address:
                    continue  # of a coordinator that has a successor
                self._is_lost, self._lost_at_s = True, time.monotonic()
                if self._is_over:
                    continue
                self._trouble = (
                    f"the connection to the coordinator at {self.request_address} was closed: it has ended, "
                    "or its process or node is gone"
                )
                self._fail(self._trouble)

    def _fail(self, reason: str) -> None:
        """End every live sequence, here and at the coordinator, which may only have been away."""
        self._end_live(UnavailableError(reason))

    def _end_live(self, error: UnavailableError) -> None:
        live = dict(self._live)
        self.abort(live)
        for deliver in live.values():
            deliver(error)

    def _send(self, message: request_channel.ToCoordinator) -> None:
        """At once: the socket has no bound. Not behind asyncio's back, which would lose sight of arrivals."""
        if self._socket is None:
            raise UnavailableError(f"not connected to the coordinator at {self.request_address}")
        self._socket.send(request_channel.encode(message))


class ClientFollower:
    """Tells a client what becomes of its group's coordinator (a `cluster.launch` Follower).

    call_soon: of the client's event loop, from any thread.
    """

    def __init__(self, client: GroupClient, call_soon: Callable[..., object]) -> None:
        self._client = client
        self._call_soon = call_soon

    def moved(self, request_address: str) -> None:
        self._call_soon(self._client.move, request_address)

    def lost(self, reason: str) -> None:
        self._call_soon(self._client.lose, reason)


async def current_stats(request_address: str, keys: MemberKeys | None) -> GroupStats:
    """A group's numbers now, not as of a heartbeat: the coordinator greets a new client with them.

    Errors: UnavailableError when the coordinator does not answer.
    """
    async with GroupClient(request_address, keys=keys) as client:
        stats = client.stats
    assert stats is not None, "connect waits for the first heartbeat"
    return stats
