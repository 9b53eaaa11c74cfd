"""The group on Ray, for programs without an event loop: its client runs in a thread of its own."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable

from actors.config import GroupConfig
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.stats import GroupStats
from cluster.answering.group_client import GroupClient, current_stats
from cluster.launch.group import launch_group
from kernels_integration.errors import LatentrayError
from kernels_integration.spans import Span


class RayEngine:
    """An Engine over GroupClient. Starts the group, and stops it when closed."""

    def __init__(
        self, config: GroupConfig, *, address: str | None, progress: Callable[[str], None] | None
    ) -> None:
        self._handle = launch_group(config, address=address, progress=progress or _silent)
        self._live: set[str] = set()
        self._found: queue.SimpleQueue[RequestUpdate | RequestFailed] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="group-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._call_client(lambda: GroupClient(self._handle.request_address))
            asyncio.run_coroutine_threadsafe(self._client.connect(), self._loop).result()
        except BaseException:
            self._stop_loop()
            self._handle.stop()
            raise

    def submit(self, request: Request) -> None:
        self._live.add(request.request_id)
        asyncio.run_coroutine_threadsafe(self._follow(request), self._loop)

    def abort(self, request_ids: Iterable[str]) -> None:
        asyncio.run_coroutine_threadsafe(self._client.abort(list(request_ids)), self._loop).result()

    def updates(self) -> list[RequestUpdate | RequestFailed]:
        if not self._live:
            return []
        found = [self._found.get()]
        while not self._found.empty():
            found.append(self._found.get())
        for update in found:
            if isinstance(update, RequestFailed) or update.finish_reason is not None:
                self._live.discard(update.request_id)
        return found

    def stats(self) -> GroupStats:
        asked = current_stats(self._handle.request_address)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    def take_trace(self) -> dict[str, list[Span]]:
        return self._handle.take_trace()

    def close(self) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self._client.close(), self._loop).result()
        finally:
            self._stop_loop()
            self._handle.stop()

    async def _follow(self, request: Request) -> None:
        """Pass a request's updates on; whatever ends it without a result becomes a RequestFailed."""
        try:
            async for update in self._client.generate(request):
                self._found.put(update)
        except Exception as error:
            code = error.code if isinstance(error, LatentrayError) else LatentrayError.code
            self._found.put(
                RequestFailed(request_id=request.request_id, code=code, message=str(error) or repr(error))
            )

    def _call_client(self, make: Callable[[], GroupClient]) -> GroupClient:
        """Inside the loop: the client's events and sockets belong to it."""

        async def run() -> GroupClient:
            return make()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _silent(_: str) -> None:
    pass
