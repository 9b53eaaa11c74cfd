"""What the groups have told of one call and its reader has yet to take.

A reader that keeps up takes every update as it came. Of one that does not, what waits for the same sequence
is merged: few updates wait, however many were told, and all sequences hold a bounded number of values.
"""

import asyncio
from collections import deque

from msgspec.structs import replace

from actors.requests import RequestUpdate, TokenLogprob
from cluster.answering.movable_sequence import MovableSequence

MAX_MERGED_VALUES = 4096
"""Of one update that was merged, token ids and alternatives with their log probabilities: it becomes one
message, whose size has limits too."""
MAX_UNREAD_VALUES = 2**20
"""Of one call. A token without log probabilities is one value, so this is beyond what any prompt allows."""


class Inbox:
    """Filled by the groups' deliveries, emptied by the call's one reader."""

    def __init__(self) -> None:
        self.num_values = 0
        """That wait."""
        self._waiting: deque[_Entry] = deque()
        self._newest: dict[MovableSequence, _Entry] = {}
        """Of each sequence, to which what it tells next may be added."""
        self._arrived = asyncio.Event()

    def put(self, sequence: MovableSequence, told: RequestUpdate | Exception) -> bool:
        """False when the reader is so far behind that the call should end."""
        num_values = _num_values(told) if isinstance(told, RequestUpdate) else 0
        self.num_values += num_values
        newest = self._newest.get(sequence)
        if (
            newest is not None
            and isinstance(told, RequestUpdate)
            and not newest.is_error
            and newest.num_values + num_values <= MAX_MERGED_VALUES
        ):
            newest.add(told, num_values)
        else:
            entry = _Entry(sequence, told, num_values)
            self._waiting.append(entry)
            self._newest[sequence] = entry
        self._arrived.set()
        return self.num_values <= MAX_UNREAD_VALUES or len(self._waiting) == 1

    async def get(self) -> tuple[MovableSequence, RequestUpdate | Exception]:
        """What has waited longest."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        entry = self._waiting.popleft()
        if self._newest[entry.sequence] is entry:
            del self._newest[entry.sequence]
        self.num_values -= entry.num_values
        return entry.sequence, entry.told


class _Entry:
    """One update, or several that became one, or an error."""

    __slots__ = ("_logprobs", "_newest", "_prompt_logprobs", "_token_ids", "num_values", "sequence")

    def __init__(self, sequence: MovableSequence, told: RequestUpdate | Exception, num_values: int) -> None:
        self.sequence = sequence
        self.num_values = num_values
        self._newest: RequestUpdate | Exception = told
        self._token_ids: list[int] | None = None
        """Of all, once there are several."""
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()

    def add(self, update: RequestUpdate, num_values: int) -> None:
        first = self._newest
        assert isinstance(first, RequestUpdate), "errors stay by themselves"
        if self._token_ids is None:
            self._token_ids, self._logprobs = list(first.token_ids), list(first.logprobs)
        self._prompt_logprobs = self._prompt_logprobs or first.prompt_logprobs or update.prompt_logprobs
        self._token_ids += update.token_ids
        self._logprobs += update.logprobs
        self._newest = update
        self.num_values += num_values

    @property
    def is_error(self) -> bool:
        return isinstance(self._newest, Exception)

    @property
    def told(self) -> RequestUpdate | Exception:
        """The newest one's totals and held tokens hold for all of them."""
        if self._token_ids is None:
            return self._newest
        assert isinstance(self._newest, RequestUpdate)
        return replace(
            self._newest,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )


def _num_values(update: RequestUpdate) -> int:
    rows = (*update.logprobs, *update.prompt_logprobs)
    return len(update.token_ids) + len(rows) + sum(len(row.top) for row in rows)
