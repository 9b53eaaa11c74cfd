"""The real coordinator and model behind the gateway's Group, without Ray: an InlineGroup in a thread."""

import asyncio
import math
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable

from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.stats import GroupStats
from cluster.errors import from_code
from kernels_integration.errors import LatentrayError
from tests.support.groups import load_tokenizer


class InlineClient:
    """Steps the group while it has work, at most `num_steps` times if that is given.

    `history` holds the group's figures after each event.
    """

    def __init__(self, config: GroupConfig, num_steps: float = math.inf) -> None:
        self._steps_left = num_steps
        self.healthy = True
        self.message = ""
        self.stats: GroupStats | None = None
        self.history: list[tuple[str, GroupStats]] = []
        self._config = config
        self._inbox: queue.SimpleQueue[Callable[[InlineGroup], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, asyncio.Queue[RequestUpdate | LatentrayError]] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="inline-group", daemon=True)
        self._thread.start()

    async def generate(self, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        request_id = request.request_id
        stream = self._streams[request_id] = asyncio.Queue()
        self._inbox.put(lambda group: self._submit(group, request))
        finished = False
        try:
            while not finished:
                update = await stream.get()
                finished = isinstance(update, LatentrayError) or update.finish_reason is not None
                if isinstance(update, LatentrayError):
                    raise update
                yield update
        finally:
            del self._streams[request_id]
            if not finished:
                await self.abort([request_id])

    async def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)

        def run(group: InlineGroup) -> None:
            group.abort(ids)
            self._note(f"abort {' '.join(ids)}", group)

        self._inbox.put(run)

    def allow(self, num_steps: float) -> None:
        """This many steps more."""

        def run(group: InlineGroup) -> None:
            self._steps_left += num_steps

        self._inbox.put(run)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    def _submit(self, group: InlineGroup, request: Request) -> None:
        try:
            group.submit(request)
        except LatentrayError as error:
            self._dispatch(request.request_id, error)
        self._note(f"submit {request.request_id}", group)

    def _run(self) -> None:
        group = InlineGroup(self._config, tokenizer=load_tokenizer())
        self.stats = group.stats()
        while True:
            while not (group.has_work and self._steps_left) or not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    group.close()
                    return
                command(group)
            self._steps_left -= 1
            for update in group.step():
                if isinstance(update, RequestFailed):
                    self._dispatch(update.request_id, from_code(update.code, update.message))
                else:
                    self._dispatch(update.request_id, update)
            self._note("step", group)

    def _note(self, event: str, group: InlineGroup) -> None:
        self.stats = group.stats()
        self.history.append((event, self.stats))

    def _dispatch(self, request_id: str, update: RequestUpdate | LatentrayError) -> None:
        def put() -> None:
            if (stream := self._streams.get(request_id)) is not None:
                stream.put_nowait(update)

        self._loop.call_soon_threadsafe(put)
