"""Which requests get which rows in the next step."""

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import NamedTuple

from actors.coordinator.blocks import BlockManager
from actors.coordinator.request_state import NOT_ADMITTED, RequestState
from actors.messages import RowKind

DraftPolicy = Callable[[RequestState], int]
"""How many drafts to propose for a request in this step; the scheduler lowers it where they do not fit."""

_order = attrgetter("arrival")


class ScheduledRows(NamedTuple):
    """The rows of one request in one step."""

    request: RequestState
    admission: int
    kind: RowKind
    k: int
    start: int
    """Position of the first row."""
    num_rows: int
    new_blocks: list[int]


class Schedule(NamedTuple):
    """One step: verifies first, by k descending, then chunks. Never empty."""

    rows: list[ScheduledRows]
    admitted: list[RequestState]


class Scheduler:
    """First come, first served, over state slots, KV blocks and the row budget of a step.

    `running` holds a state slot and a block table; `waiting` holds neither. Both are in scheduling
    order, and nobody in `waiting` comes before anybody in `running`.
    """

    def __init__(
        self,
        *,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        num_speculative_tokens: int,
        draft_policy: DraftPolicy,
    ) -> None:
        self.running: list[RequestState] = []
        self.waiting: list[RequestState] = []
        self.num_preemptions = 0
        self._blocks = blocks
        self._max_rows = max_num_batched_tokens
        self._max_drafts = num_speculative_tokens
        self._draft_policy = draft_policy
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._last_admission = NOT_ADMITTED

    def add(self, request: RequestState) -> None:
        insort(self.waiting, request, key=_order)

    def remove(self, request: RequestState) -> None:
        """The request has ended; its slot and blocks are free for the next message."""
        queue = self.waiting if request.admission == NOT_ADMITTED else self.running
        index = bisect_left(queue, request.arrival, key=_order)
        assert queue[index] is request
        del queue[index]
        if request.admission != NOT_ADMITTED:
            self._withdraw(request)

    def withdraw_all(self) -> None:
        """The shards lost their state: everybody comes back under a new admission number."""
        while self.running:
            self._move_to_waiting(self.running.pop())

    def schedule(self) -> Schedule | None:
        """The next step, or None if there is nothing to run.

        Running requests first, in order: a verify, or a chunk of a prompt (or of what a preempted request had
        committed); all verifies come before, as rows are given in order. Drafts leave a row for every later
        anchor. Then admissions, unless this step preempted: its victim would come straight back.
        """
        rows_left = self._max_rows
        anchors_left = sum(request.decoding for request in self.running)
        scheduled: list[ScheduledRows] = []
        num_preemptions = self.num_preemptions
        index = 0
        while rows_left and index < len(self.running):  # a victim leaves from the end: never one scheduled
            request = self.running[index]
            if request.decoding:
                anchors_left -= 1
                if not self._make_room(request):
                    break
                rows = self._verify(request, rows_left - anchors_left)
            else:
                rows = self._chunk(request, rows_left, new_blocks=[])
            scheduled.append(rows)
            rows_left -= rows.num_rows
            index += 1

        admitted: list[RequestState] = []
        if self.num_preemptions == num_preemptions:
            while rows_left and self._can_admit():
                request = self.waiting.pop(0)
                rows = self._admit(request, rows_left)
                admitted.append(request)
                scheduled.append(rows)
                rows_left -= rows.num_rows
        if not scheduled:
            return None
        return Schedule(sorted(scheduled, key=_message_order), admitted)

    def _make_room(self, request: RequestState) -> bool:
        """Let the anchor's row fit, preempting from the end of `running`; False if it was itself the last."""
        while self._blocks.reservable_tokens(request.admission) < len(request.tokens):
            victim = self.running.pop()
            self.num_preemptions += 1
            self._move_to_waiting(victim)
            if victim is request:
                return False
        return True

    def _verify(self, request: RequestState, max_rows: int) -> ScheduledRows:
        """The anchor and as many drafts as policy, limit, rows and blocks allow: they preempt nobody."""
        num_tokens = len(request.tokens)
        k = min(
            self._draft_policy(request) if self._max_drafts else 0,
            self._max_drafts,
            request.limit - 1 - num_tokens,
            max_rows - 1,
        )
        new_blocks: list[int] = []
        if num_tokens + max(k, 0) > self._blocks.reserved_tokens(request.admission):
            k = min(k, self._blocks.reservable_tokens(request.admission) - num_tokens)
            new_blocks = self._blocks.reserve(request.admission, num_tokens + max(k, 0))
        k = max(k, 0)
        return ScheduledRows(request, request.admission, RowKind.VERIFY, k, num_tokens - 1, k + 1, new_blocks)

    def _chunk(self, request: RequestState, max_rows: int, *, new_blocks: list[int]) -> ScheduledRows:
        """The next rows of the committed tokens; the last of them yields the next token."""
        start = request.num_computed
        remaining = len(request.tokens) - start
        num_rows = min(remaining, max_rows)
        kind = RowKind.FINAL_CHUNK if num_rows == remaining else RowKind.MIDDLE_CHUNK
        return ScheduledRows(request, request.admission, kind, 0, start, num_rows, new_blocks)

    def _can_admit(self) -> bool:
        """Head of the line only. All committed tokens must fit, so that a chunk never needs a block later."""
        return (
            bool(self.waiting and self._free_slots)
            and self._blocks.blocks_for(len(self.waiting[0].tokens)) <= self._blocks.num_free
        )

    def _admit(self, request: RequestState, max_rows: int) -> ScheduledRows:
        self._last_admission += 1
        request.admit(self._last_admission, self._free_slots.pop())
        self._blocks.open(request.admission)
        insort(self.running, request, key=_order)
        table = self._blocks.reserve(request.admission, len(request.tokens))
        return self._chunk(request, max_rows, new_blocks=table)

    def _move_to_waiting(self, request: RequestState) -> None:
        self._withdraw(request)
        insort(self.waiting, request, key=_order)

    def _withdraw(self, request: RequestState) -> None:
        self._blocks.release(request.admission)
        self._free_slots.append(request.slot)
        request.withdraw()


def _message_order(rows: ScheduledRows) -> int:
    return -rows.k if rows.kind is RowKind.VERIFY else 1
