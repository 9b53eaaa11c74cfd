"""A group inside this process as a Group: its steps run in the event loop, one after the other."""

import asyncio
from collections.abc import Iterable

from actors.inline_group import InlineGroup
from actors.requests import Request, RequestFailed, SequenceKey
from actors.stats import GroupStats
from cluster.answering.group import Deliver
from cluster.errors import from_code
from kernels_integration.errors import UnavailableError


class LocalGroup:
    """Steps the group while it has work. The loop waits for each step: it should have little else to do."""

    def __init__(self, group: InlineGroup) -> None:
        self._group = group
        self._live: dict[SequenceKey, Deliver] = {}
        self._stepping: asyncio.Task[None] | None = None
        self.healthy = True
        self.is_recovering = False
        self.message = "ready"

    @property
    def stats(self) -> GroupStats:
        return self._group.stats()

    async def connect(self) -> None:
        """It is here."""

    def submit(self, request: Request, deliver: Deliver) -> None:
        if not self.healthy:
            raise UnavailableError(self.message)
        self._group.submit(request)
        self._live[request.key] = deliver
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step(), name="local-group")

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        self._group.abort([key for key in keys if self._live.pop(key, None) is not None])

    async def current_stats(self) -> GroupStats:
        return self.stats

    async def close(self) -> None:
        self._fail(UnavailableError("the group was closed"))
        if self._stepping is not None:
            await self._stepping

    async def _step(self) -> None:
        while self._group.has_work:
            await asyncio.sleep(0)  # others submit and abort between steps
            try:
                updates = self._group.step()
            except Exception as error:
                self._fail(error)
                return
            for update in updates:
                if isinstance(update, RequestFailed):
                    if (deliver := self._live.pop(update.key, None)) is not None:
                        deliver(from_code(update.code, update.message))
                elif (deliver := self._live.get(update.key)) is not None:
                    if update.finish_reason is not None:
                        del self._live[update.key]
                    deliver(update)

    def _fail(self, error: Exception) -> None:
        """For good: a group that failed in a step has lost what its shards held."""
        self.healthy, self.message = False, str(error) or repr(error)
        live = dict(self._live)
        self.abort(live)
        for deliver in live.values():
            deliver(error)
