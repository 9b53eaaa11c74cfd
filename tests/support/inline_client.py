"""The real coordinator and model behind the gateway's Group, without Ray: an InlineGroup in a thread."""

import asyncio
import math
import queue
import threading
from collections.abc import Callable, Iterable

from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.requests import Request, RequestFailed, RequestUpdate, SequenceKey
from actors.stats import GroupStats
from cluster.answering.group import Deliver
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
        self._live: dict[SequenceKey, Deliver] = {}
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="inline-group", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Deliver) -> None:
        self._live[request.key] = deliver
        self._inbox.put(lambda group: self._submit(group, request))

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        live = [key for key in keys if self._live.pop(key, None) is not None]

        def run(group: InlineGroup) -> None:
            group.abort(live)
            self._note(f"abort {' '.join(key.request_id for key in live)}", group)

        if live:
            self._inbox.put(run)

    async def connect(self) -> None:
        pass

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
            self._dispatch(request.key, error)
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
                    self._dispatch(update.key, from_code(update.code, update.message))
                else:
                    self._dispatch(update.key, update)
            self._note("step", group)

    def _note(self, event: str, group: InlineGroup) -> None:
        self.stats = group.stats()
        self.history.append((event, self.stats))

    def _dispatch(self, key: SequenceKey, update: RequestUpdate | LatentrayError) -> None:
        def deliver() -> None:
            if key in self._live:
                is_over = isinstance(update, LatentrayError) or update.finish_reason is not None
                (self._live.pop(key) if is_over else self._live[key])(update)

        self._loop.call_soon_threadsafe(deliver)
