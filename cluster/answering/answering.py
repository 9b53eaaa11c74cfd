"""The one door: a request in, its updates out, whoever asked and wherever its group runs.

A call is admitted under the user's id, becomes n sequences of a new incarnation, and ends with its last
update, a failure of the group, `abort`, its deadline, the drain, or its reader's leaving. However it ends,
its sequences end too.
"""

import asyncio
import math
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial

from msgspec.structs import replace

from actors.requests import Request, RequestUpdate, SequenceKey
from cluster.access.principal import ANYBODY, Principal
from cluster.answering.admission import NO_LIMITS, Asked, Limits, refusal
from cluster.answering.choices import choices
from cluster.answering.group import Group, Groups
from cluster.answering.inbox import Inbox
from cluster.answering.live_requests import LiveRequest, LiveRequests
from cluster.answering.movable_sequence import MovableSequence
from kernels_integration.errors import (
    AbortedError,
    DeadlineExceededError,
    LetGoError,
    OverloadedError,
    UnavailableError,
)

PATIENCE_S = 10.0
MAX_MOVES = 16
"""Of one sequence, however far it came: groups that are lost so often are not to be kept busy."""
MAX_MOVES_IN_VAIN = 3
"""A request that was on so many groups as they were lost, and got no token between, may be why."""
_READS_TOO_SLOWLY = (
    "the client reads so slowly that more of the answer waits for it than is kept; read faster, or ask for "
    "fewer log probabilities, choices or tokens"
)


class Answering:
    """Answers the requests of one front end by its groups. Used in one event loop.

    max_sequences_per_client: of the requests that one client has running; None: any number. limits: of what
    waits in all groups, whichever front end has sent it. patience_s: how
    long a request waits for groups that recover, when there are no others; one that has begun waits as long
    as they do.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        *,
        max_sequences_per_client: int | None = None,
        patience_s: float = PATIENCE_S,
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.groups = Groups(groups)
        self._limits = limits
        self._patience_s = patience_s
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
        self,
        request_id: str,
        *,
        principal: Principal = ANYBODY,
        client: str = "",
        tenant: str = "",
        time_left_s: float | None = None,
    ) -> AsyncIterator[LiveRequest]:
        """Hold an id while a call of the current task is answered. principal: whose id it is.

        What ends the request from outside also ends what the task waits for inside: tokenising, the group,
        the client's reading. tenant: whose part of the queues it takes.
        Errors: UnavailableError while draining; DuplicateRequestError; OverloadedError when the principal has
        as many requests as it may; DeadlineExceededError when no time is
        left, or later; AbortedError after `abort`.
        """
        if self.is_draining:
            raise UnavailableError("the server is draining and takes no new requests; ask another one")
        if time_left_s is not None and time_left_s <= 0:
            raise DeadlineExceededError("the deadline had passed when the request arrived; allow more time")
        live = self.live.enter(request_id, client, tenant, principal)
        timer = None
        if time_left_s is not None:
            live.ends_at_s = asyncio.get_running_loop().time() + time_left_s
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

        Tokens that may be part of a stop string are held until that is decided. What a slow reader has yet to
        take is merged; beyond a bound its call ends with OverloadedError. Close the iterator to leave.
        A sequence whose group is lost goes on where it was, on another group or on the lost one's successor.
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
        self.live.require_room(live, sum(request.params.n for request in requests))  # before any is made
        sequences = [
            MovableSequence(choice, position)
            for position, request in enumerate(requests)
            for choice in choices(replace(request, tenant=live.tenant) if live.tenant else request)
        ]
        self._require_admission(live, [sequence.request for sequence in sequences])
        running: dict[SequenceKey, MovableSequence] = {}
        inbox = Inbox()

        def deliver(key: SequenceKey, update: RequestUpdate | Exception) -> None:
            sequence = running[key]
            live.answered = True
            if isinstance(update, Exception) or update.finish_reason is not None:
                self._left(running.pop(key))
                num_left[0] -= not isinstance(update, UnavailableError)  # which is not its end
                if not num_left[0]:
                    self.live.answered(live)
            if not inbox.put(sequence, update):
                self.live.end_one(live, OverloadedError(_READS_TOO_SLOWLY))

        def submit(sequence: MovableSequence, group: Group) -> None:
            running[sequence.key] = sequence
            sequence.group = live.group = group
            sequence.weights = self.groups.weights_of(group)
            self.groups.took(group, sequence.request)
            group.submit(sequence.request, partial(deliver, sequence.key))

        num_left = [len(sequences)]
        num_unread = len(sequences)
        try:
            group = await self.groups.find(requests[0], self._patience_s)
            for sequence in sequences:
                submit(sequence, group)
            while num_unread:
                sequence, update = await inbox.get()
                if isinstance(update, UnavailableError):
                    submit(sequence, await self._next_group(sequence, update))
                elif isinstance(update, Exception):
                    raise update
                else:
                    num_unread -= update.finish_reason is not None
                    yield sequence.position, sequence.take(update)
        finally:
            keys: defaultdict[Group | None, list[SequenceKey]] = defaultdict(list)
            for key, sequence in running.items():
                keys[sequence.group].append(key)
                self._left(sequence)
            for of_group, its_keys in keys.items():
                assert of_group is not None, "they run"
                of_group.abort(its_keys)

    def _left(self, sequence: MovableSequence) -> None:
        assert sequence.group is not None, "it runs"
        self.groups.left(sequence.group, sequence.key)

    def _require_admission(self, live: LiveRequest, sequences: Sequence[Request]) -> None:
        """Errors: OverloadedError where the queues have no room, or its deadline would pass in them."""
        asked = Asked(
            num_requests=len(sequences),
            num_tokens=sum(len(sequence.prompt_token_ids) for sequence in sequences),
            max_tokens=max(sequence.params.max_tokens or sys.maxsize for sequence in sequences),
            tenant=sequences[0].tenant,
            priority=sequences[0].priority,
            time_left_s=live.time_left_s,
        )
        if (refused := refusal(asked, self.groups.queues(), self._limits)) is not None:
            raise OverloadedError(refused.reason, retry_after_s=refused.retry_after_s)

    async def _next_group(self, sequence: MovableSequence, error: UnavailableError) -> Group:
        """Where a sequence goes on whose group was lost, recovers or is drained. Errors: `error`, when there
        is none."""
        sequence.move(is_lost=not isinstance(error, LetGoError))
        if sequence.num_moves_in_vain > MAX_MOVES_IN_VAIN:
            raise UnavailableError(
                f"the request was moved {MAX_MOVES_IN_VAIN} times without another token, and its last group "
                f"was lost too: {error}"
            ) from error
        if sequence.num_moves > MAX_MOVES:
            raise UnavailableError(
                f"the request was moved {MAX_MOVES} times, and its last group was lost too: {error}"
            ) from error
        try:
            return await self.groups.find(sequence.request, math.inf, sequence.weights_to_keep)
        except UnavailableError:
            raise error from None

    def abort(self, request_ids: Iterable[str], *, principal: Principal = ANYBODY) -> None:
        """End a principal's requests by their ids; their calls raise AbortedError. Others are ignored."""
        self.live.end(request_ids, AbortedError("the request was ended by Abort"), principal)

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
