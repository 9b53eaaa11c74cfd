"""The requests that a front end is answering now: owner of users' ids, limits and ends from outside."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from cluster.access.principal import ANYBODY, Principal
from cluster.answering.group import Group
from kernels_integration.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    LatentrayError,
    OverloadedError,
)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request between admission and the end of its call."""

    request_id: str
    client: str = ""
    """Which host or principal asked; "" counts against no limit."""
    tenant: str = ""
    """Whose part of the queues it takes: the principal's tenant, or where there are no keys who it says."""
    principal: Principal = ANYBODY
    """Whose id it is."""
    group: Group | None = None
    """Once its sequences run."""
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    """Known once the prompt is tokenised."""
    answered: bool = False
    """Its first tokens have come from the group."""
    ends_at_s: float | None = None
    """Its deadline, by the event loop's clock."""
    task: "asyncio.Task[object] | None" = field(default_factory=asyncio.current_task)
    ended_by: LatentrayError | None = None

    @property
    def time_left_s(self) -> float | None:
        """Until its deadline; None: it has none."""
        return None if self.ends_at_s is None else self.ends_at_s - asyncio.get_running_loop().time()


class LiveRequests:
    """By tenant and id, in order of arrival. One leaves when its group has answered it, or its call ends."""

    def __init__(self, *, max_sequences_per_client: int | None = None) -> None:
        self._max_sequences_per_client = max_sequences_per_client
        self._by_id: dict[tuple[str, str], LiveRequest] = {}
        self._delivering: set[LiveRequest] = set()
        """Answered by the group, but not yet read by their clients."""
        self._num_sequences: Counter[str] = Counter()
        """Of all these, by client."""
        self._num_requests: Counter[str] = Counter()
        """Of all these, by tenant."""
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def enter(
        self, request_id: str, client: str = "", tenant: str = "", principal: Principal = ANYBODY
    ) -> LiveRequest:
        """The request of the current task.

        Errors: DuplicateRequestError (an id that has ended is free, and so is another tenant's);
        OverloadedError when the principal has as many requests as it may.
        """
        key = (principal.tenant, request_id)
        if key in self._by_id:
            raise DuplicateRequestError.of(request_id)
        num_requests, most = self._num_requests[principal.tenant], principal.max_requests
        if most is not None and num_requests >= most:
            raise OverloadedError(
                f"tenant {principal.tenant} has {num_requests} requests running, waiting or not read to "
                f"their end, as many as its keys allow (max-requests {most}); wait for one to end"
            )
        # Behind a proxy all tenants are one host.
        live = LiveRequest(request_id, principal.tenant or client, tenant, principal)
        self._by_id[key] = live
        self._num_requests[principal.tenant] += 1
        self._empty.clear()
        return live

    def require_room(self, live: LiveRequest, num_sequences: int) -> None:
        """Count its sequences.

        Errors: OverloadedError where the client then has too many; InvalidRequestError where they alone are.
        """
        limit = self._max_sequences_per_client
        if live.client and limit is not None:
            if num_sequences > limit:
                raise InvalidRequestError(
                    f"n asks for {num_sequences} sequences in all; a client may have {limit} at once: "
                    "lower n, or send fewer prompts in a request",
                    field="n",
                )
            num_held = self._num_sequences[live.client]
            if num_held + num_sequences > limit:
                raise OverloadedError(
                    f"this client has {num_held} sequences running or not read to their end, and "
                    f"{num_sequences} more would exceed {limit}; wait for some to end, or lower n"
                )
        live.num_sequences = num_sequences
        self._num_sequences[live.client] += num_sequences

    def answered(self, live: LiveRequest) -> None:
        """The group has no more to say: its id is free, however slowly the client reads."""
        key = (live.principal.tenant, live.request_id)
        if self._by_id.get(key) is live:
            del self._by_id[key]
            self._delivering.add(live)

    def leave(self, live: LiveRequest) -> None:
        """Its call has ended."""
        self.answered(live)
        self._delivering.discard(live)
        self._num_requests[live.principal.tenant] -= 1
        if not self._num_requests[live.principal.tenant]:
            del self._num_requests[live.principal.tenant]
        self._num_sequences[live.client] -= live.num_sequences
        if not self._num_sequences[live.client]:
            del self._num_sequences[live.client]
        if not self._by_id and not self._delivering:
            self._empty.set()

    def end(self, request_ids: Iterable[str], error: LatentrayError, principal: Principal = ANYBODY) -> None:
        """End the calls of a principal's requests with `error`, whatever they wait for.

        Other ids are no error.
        """
        for request_id in request_ids:
            if (live := self._by_id.get((principal.tenant, request_id))) is not None:
                self.end_one(live, error)

    def end_one(self, live: LiveRequest, error: LatentrayError) -> None:
        if live.task is not None and live.ended_by is None:
            live.ended_by = error
            live.task.cancel()

    def end_all(self, error: LatentrayError) -> None:
        for live in (*self._by_id.values(), *self._delivering):
            self.end_one(live, error)

    async def wait_until_empty(self) -> None:
        """Until every call has ended."""
        await self._empty.wait()

    def num_waiting_prompt_tokens(self, group: Group, num_waiting: int) -> int:
        """Prompt tokens of a group's `num_waiting` youngest requests that have no token yet."""
        unanswered = [
            live.num_prompt_tokens
            for live in self._by_id.values()
            if not live.answered and live.group is group
        ]
        return sum(unanswered[-num_waiting:]) if num_waiting else 0
