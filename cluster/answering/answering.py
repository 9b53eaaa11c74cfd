"""The one door: a request in, its updates out, whoever asked and wherever its group runs.

A call is admitted under the user's id, becomes n sequences of a new incarnation, and ends with its last
update, a failure of the group, `abort`, its deadline, the drain, or its reader's leaving. However it ends,
its sequences end too.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

from msgspec.structs import replace

from actors.requests import Request, RequestUpdate, TokenLogprob
from cluster.answering.choices import choices
from cluster.answering.group import Group, Groups
from cluster.answering.live_requests import LiveRequest, LiveRequests
from kernels_integration.errors import AbortedError, DeadlineExceededError, UnavailableError


class Answering:
    """Answers the requests of one front end by its groups. Used in one event loop.

    max_sequences_per_client: of the requests that one client has running; None: any number.
    """

    def __init__(self, groups: Sequence[Group], *, max_sequences_per_client: int | None = None) -> None:
        self.groups = Groups(groups)
        self.live = LiveRequests(max_sequences_per_client=max_sequences_per_client)
        self.is_draining = False
        """Set once, when no more requests are taken."""

    async def run(
        self, request: Request, *, client: str = "", time_left_s: float | None = None
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Admit a request and answer it: `admit` and `answer` in one."""
        async with (
            self.admit(request.request_id, client=client, time_left_s=time_left_s) as live,
            aclosing(self.answer(live, request)) as updates,
        ):
            async for update in updates:
                yield update

    @asynccontextmanager
    async def admit(
        self, request_id: str, *, client: str = "", time_left_s: float | None = None
    ) -> AsyncIterator[LiveRequest]:
        """Hold an id while a call of the current task is answered.

        What ends the request from outside also ends what the task waits for inside: tokenising, the group,
        the client's reading.
        Errors: UnavailableError while draining; DuplicateRequestError; DeadlineExceededError when no time is
        left, or later; AbortedError after `abort`.
        """
        if self.is_draining:
            raise UnavailableError("the server is draining and takes no new requests; ask another one")
        if time_left_s is not None and time_left_s <= 0:
            raise DeadlineExceededError("the deadline had passed when the request arrived; allow more time")
        live = self.live.enter(request_id, client)
        timer = None
        if time_left_s is not None:
            error = DeadlineExceededError(f"the deadline of {time_left_s:.3g} s has passed")
            timer = asyncio.get_running_loop().call_later(time_left_s, self.live.end_one, live, error)
        try:
            yield live
        except asyncio.CancelledError:
            if live.ended_by is None:
                raise
            assert live.task is not None
            live.task.uncancel()  # the cancellation was a message to this place, as in asyncio.timeout
            raise live.ended_by from None
        finally:
            if timer is not None:
                timer.cancel()
            self.live.leave(live)

    async def answer(self, live: LiveRequest, request: Request) -> AsyncGenerator[RequestUpdate, None]:
        """The updates of all n sequences as they come; `index` says whose, the last has a finish_reason.

        Tokens that may be part of a stop string are held until that is decided. Close the iterator to leave.
        Errors: OverloadedError; what the group refuses or fails with. When one sequence fails, all end.
        """
        async with aclosing(self.answer_all(live, (request,))) as updates:
            async for _, update in updates:
                yield update

    async def answer_all(
        self, live: LiveRequest, requests: Sequence[Request]
    ) -> AsyncGenerator[tuple[int, RequestUpdate], None]:
        """As `answer`, of several requests that one call asks for: (whose, an update of it)."""
        live.num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        sequences = [
            (position, sequence) for position, request in enumerate(requests) for sequence in choices(request)
        ]
        self.live.require_room(live, len(sequences))
        group = live.group = self.groups.choose()
        running = {sequence.key for _, sequence in sequences}
        arrived: asyncio.Queue[tuple[int, RequestUpdate | Exception]] = asyncio.Queue()

        def deliver(number: int, update: RequestUpdate | Exception) -> None:
            live.answered = True
            if isinstance(update, Exception) or update.finish_reason is not None:
                running.discard(sequences[number][1].key)
                if not running:
                    self.live.answered(live)
            arrived.put_nowait((number, update))

        holding = [Holding() for _ in sequences]
        num_unread = len(sequences)
        self.groups.took(group, len(sequences))
        try:
            for number, (_, sequence) in enumerate(sequences):
                group.submit(sequence, partial(deliver, number))
            while num_unread:
                number, update = await arrived.get()
                if isinstance(update, Exception):
                    raise update
                num_unread -= update.finish_reason is not None
                yield sequences[number][0], holding[number].pass_on(update)
        finally:
            self.groups.took(group, -len(sequences))
            group.abort(running)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by their users' ids; their calls raise AbortedError. Others are ignored."""
        self.live.end(request_ids, AbortedError("the request was ended by Abort"))

    async def drain(self, drain_s: float) -> None:
        """Take no new requests, give live ones `drain_s` seconds, end the rest with UnavailableError."""
        self.is_draining = True
        try:
            async with asyncio.timeout(drain_s):
                await self.live.wait_until_empty()
        except TimeoutError:
            self.live.end_all(
                UnavailableError(f"the server stopped after draining for {drain_s:g} s; ask again")
            )
            await self.live.wait_until_empty()


class Holding:
    """The newest tokens of one sequence that wait, with their log probabilities."""

    __slots__ = ("_logprobs", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: tuple[int, ...] = ()
        self._logprobs: tuple[TokenLogprob, ...] = ()

    def pass_on(self, update: RequestUpdate) -> RequestUpdate:
        """The update with the tokens that need not wait any more."""
        if not update.num_held and not self._token_ids:
            return update
        token_ids, logprobs = self._token_ids + update.token_ids, self._logprobs + update.logprobs
        num_free = len(token_ids) - update.num_held
        self._token_ids, self._logprobs = token_ids[num_free:], logprobs[num_free:]
        return replace(update, token_ids=token_ids[:num_free], logprobs=logprobs[:num_free], num_held=0)
