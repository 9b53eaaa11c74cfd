"""A front end's connection to one coordinator: submit, stream, abort, health. No torch, no Ray."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from types import TracebackType

import zmq
import zmq.asyncio

from actors.requests import Request, RequestFailed, RequestUpdate
from actors.stats import GroupStats
from actors.transport import request_channel
from actors.transport.request_channel import Abort, Goodbye, GroupBeat, Hello, Submit, Updates
from cluster.errors import from_code
from kernels_integration.errors import DuplicateRequestError, LatentrayError, UnavailableError

SILENCE_S = 3.0
"""A coordinator not heard for so long is taken for lost."""


class GroupClient:
    """Requests of one event loop to one group.

    `request_address` comes from GroupHandle. `connect` (or `async with`) starts it in the running
    loop; `generate` connects by itself. Ends its requests when it closes.
    """

    def __init__(self, request_address: str, *, silence_s: float = SILENCE_S) -> None:
        self.request_address = request_address
        self._silence_s = silence_s
        self._socket: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._streams: dict[str, asyncio.Queue[RequestUpdate | LatentrayError]] = {}
        self._beat: GroupBeat | None = None
        self._heard_at_s = 0.0
        self._first_beat = asyncio.Event()

    @property
    def stats(self) -> GroupStats | None:
        """The group's numbers as of its last heartbeat; None before the first."""
        return self._beat.stats if self._beat is not None else None

    @property
    def healthy(self) -> bool:
        """The coordinator was heard within the last seconds and all of its shards live."""
        return self._beat is not None and self._beat.healthy and not self._is_silent

    @property
    def message(self) -> str:
        """Why the group is not healthy, in words."""
        if self._beat is None:
            return f"no heartbeat from the coordinator at {self.request_address} yet"
        if self._is_silent:
            silence_s = time.monotonic() - self._heard_at_s
            return f"no heartbeat from the coordinator at {self.request_address} for {silence_s:.1f} s"
        return self._beat.message

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
            socket.connect(self.request_address)
            self._socket = socket
            self._tasks = [
                asyncio.create_task(self._receive(socket), name="group-client-receive"),
                asyncio.create_task(self._keep_alive(socket), name="group-client-beat"),
            ]
        try:
            await asyncio.wait_for(self._first_beat.wait(), timeout_s)
        except TimeoutError:
            raise UnavailableError(
                f"the coordinator at {self.request_address} did not answer within {timeout_s:g} s; "
                "check that the group runs and that its port can be reached"
            ) from None

    async def generate(self, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        """The request's updates; the last has a finish_reason. Leaving the loop early aborts it.

        Errors: the LatentrayError that the coordinator answered with; AbortedError after an abort;
        UnavailableError when the group is lost; DuplicateRequestError for an id that is live.
        """
        await self.connect()
        if not self.healthy:
            raise UnavailableError(self.message)
        request_id = request.request_id
        if request_id in self._streams:
            raise DuplicateRequestError(
                f"request id {request_id!r} belongs to a live request; use another id"
            )
        stream: asyncio.Queue[RequestUpdate | LatentrayError] = asyncio.Queue()
        self._streams[request_id] = stream
        is_over = False
        try:
            await self._send(Submit(request))
            while not is_over:
                update = await stream.get()
                is_over = isinstance(update, LatentrayError) or update.finish_reason is not None
                if isinstance(update, LatentrayError):
                    raise update
                yield update
        finally:
            del self._streams[request_id]
            if not is_over:
                self._send_soon(Abort((request_id,)))

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests; their streams raise AbortedError. Unknown ids are ignored."""
        await self._send(Abort(tuple(request_ids)))

    async def close(self) -> None:
        """Leave the group; live streams raise UnavailableError and their requests are aborted."""
        if self._socket is None:
            return
        self._fail_streams("the connection to the group was closed")
        self._send_soon(Goodbye())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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

    @property
    def _is_silent(self) -> bool:
        return time.monotonic() - self._heard_at_s > self._silence_s

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            message = request_channel.decode_to_client(await socket.recv())
            self._heard_at_s = time.monotonic()
            if isinstance(message, Updates):
                self._dispatch(message)
            else:
                self._beat = message
                self._first_beat.set()

    def _dispatch(self, message: Updates) -> None:
        for update in message.updates:
            if (stream := self._streams.get(update.request_id)) is not None:
                stream.put_nowait(update)
        for failed in message.failures:
            if (stream := self._streams.get(failed.request_id)) is not None:
                stream.put_nowait(_error_of(failed))

    async def _keep_alive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await socket.send(request_channel.encode(Hello()))
            await asyncio.sleep(request_channel.BEAT_S)
            if self._streams and self._is_silent:
                # This loop itself may have been away: what has arrived meanwhile is read first.
                await asyncio.sleep(0.1)
                if self._is_silent:
                    self._fail_streams(self.message)

    def _fail_streams(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.put_nowait(UnavailableError(reason))

    async def _send(self, message: request_channel.ToCoordinator) -> None:
        if self._socket is None:
            raise UnavailableError(f"not connected to the coordinator at {self.request_address}")
        await self._socket.send(request_channel.encode(message))

    def _send_soon(self, message: request_channel.ToCoordinator) -> None:
        """Send from clean-up code, which must not wait: the socket has no bound, so this is at once."""
        if self._socket is not None:
            zmq.Socket.send(self._socket, request_channel.encode(message), zmq.NOBLOCK)


def _error_of(failed: RequestFailed) -> LatentrayError:
    return from_code(failed.code, failed.message)


async def current_stats(request_address: str) -> GroupStats:
    """A group's numbers now, not as of a heartbeat: the coordinator greets a new client with them.

    Errors: UnavailableError when the coordinator does not answer.
    """
    async with GroupClient(request_address) as client:
        stats = client.stats
    assert stats is not None, "connect waits for the first heartbeat"
    return stats
