"""A group with slots, a queue and figures of both, whose requests take a given time each."""

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress

from actors.requests import Request, SequenceKey
from actors.stats import GroupStats, PhaseTimes, queue_parts
from cluster.answering.group import Deliver
from tests.support.scripted_group import update


class QueueingGroup:
    """Implements Group. One token for a request in the middle of its time, one at its end."""

    def __init__(self, *, num_slots: int, service_s: float, beat_s: float = 0.05) -> None:
        self.healthy = True
        self.is_recovering = False
        self.message = ""
        self.max_running = 0
        self.max_waiting = 0
        self._num_slots = num_slots
        self._service_s = service_s
        self._beat_s = beat_s
        self._slots = asyncio.Semaphore(num_slots)
        self._waiting: dict[SequenceKey, Request] = {}
        self._tasks: dict[SequenceKey, asyncio.Task[None]] = {}
        self._busy_s = 0.0
        self._num_finished = 0
        self._told_at_s = 0.0
        self._stats = GroupStats(num_slots=num_slots)

    @property
    def stats(self) -> GroupStats | None:
        """As of a heartbeat."""
        if time.monotonic() >= self._told_at_s + self._beat_s:
            self._told_at_s = time.monotonic()
            self._stats = GroupStats(
                num_slots=self._num_slots,
                running=len(self._tasks) - len(self._waiting),
                waiting=len(self._waiting),
                num_generated_tokens=2 * self._num_finished,
                phases=PhaseTimes(num_finished=self._num_finished, decode_s=self._busy_s),
                queue=queue_parts(
                    (r.tenant, r.priority, len(r.prompt_token_ids)) for r in self._waiting.values()
                ),
            )
        return self._stats

    @property
    def num_live(self) -> int:
        return len(self._tasks)

    async def connect(self) -> None:
        pass

    def submit(self, request: Request, deliver: Deliver) -> None:
        self._waiting[request.key] = request
        self.max_waiting = max(self.max_waiting, len(self._waiting))
        task = self._tasks[request.key] = asyncio.create_task(self._serve(request, deliver))
        task.add_done_callback(lambda task: self._leave(request.key, task))

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        for key in keys:
            if (task := self._tasks.get(key)) is not None:
                self._leave(key, task)
                task.cancel()

    def _leave(self, key: SequenceKey, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
            self._waiting.pop(key, None)

    async def _serve(self, request: Request, deliver: Deliver) -> None:
        with suppress(asyncio.CancelledError):
            async with self._slots:
                del self._waiting[request.key]
                self.max_running = max(self.max_running, self._num_slots - self._slots._value)
                start_s = time.monotonic()
                await asyncio.sleep(self._service_s / 2)
                deliver(update(request, [5]))
                await asyncio.sleep(self._service_s / 2)
                self._busy_s += time.monotonic() - start_s
                self._num_finished += 1
                del self._tasks[request.key]
                deliver(update(request, [6], 1, finish_reason="length"))
