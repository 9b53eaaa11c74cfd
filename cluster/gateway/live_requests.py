"""The requests that a gateway is answering now: unique ids, and a way to end one from outside its call."""

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass

from kernels_integration.errors import DuplicateRequestError, LatentrayError


@dataclass(slots=True)
class LiveRequest:
    """One request between admission and the end of its call."""

    num_prompt_tokens: int = 0
    """Known once the prompt is tokenised."""
    answered: bool = False
    """Its first tokens have come from the group."""
    work: asyncio.Task[None] | None = None
    ended_by: LatentrayError | None = None


class LiveRequests:
    """By id, in order of arrival."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveRequest] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_id)

    async def run(self, request_id: str, live: LiveRequest, work: Coroutine[None, None, None]) -> None:
        """Await `work` as a task of its own: a cancelled call cancels it, and so does `end`.

        Errors: DuplicateRequestError when the id is live (one that has ended may come again); whatever
        work raises; the error given to `end`.
        """
        if request_id in self._by_id:
            work.close()
            raise DuplicateRequestError(
                f"request_id {request_id!r} belongs to a live request; "
                "wait for its end, abort it, or send another id"
            )
        self._by_id[request_id] = live
        self._empty.clear()
        live.work = asyncio.create_task(work)
        try:
            await live.work
        except asyncio.CancelledError:
            if live.ended_by is None:
                raise
            raise live.ended_by from None
        finally:
            del self._by_id[request_id]
            if not self._by_id:
                self._empty.set()

    def end(self, request_ids: Iterable[str], error: LatentrayError) -> None:
        """Stop the work of these requests; their calls end with `error`. Other ids are no error."""
        for request_id in request_ids:
            live = self._by_id.get(request_id)
            if live is not None and live.work is not None and live.ended_by is None:
                live.ended_by = error
                live.work.cancel()

    def end_all(self, error: LatentrayError) -> None:
        self.end(tuple(self._by_id), error)

    async def wait_until_empty(self) -> None:
        await self._empty.wait()

    def num_waiting_prompt_tokens(self, num_waiting: int) -> int:
        """Prompt tokens of the `num_waiting` youngest requests that have no token yet."""
        unanswered = [live.num_prompt_tokens for live in self._by_id.values() if not live.answered]
        return sum(unanswered[-num_waiting:]) if num_waiting else 0
