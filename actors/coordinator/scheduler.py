"""Which requests get which rows in the next step."""

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from actors.config import GroupConfig
from actors.coordinator.blocks import BlockManager
from actors.coordinator.draft_policy import DraftPolicy
from actors.coordinator.prefix_cache import PrefixCache
from actors.coordinator.request_state import NOT_ADMITTED, RequestState
from actors.coordinator.schedule import (
    NOTHING,
    UNKNOWN_START,
    InFlight,
    Schedule,
    ScheduledRows,
    in_flight_by_admission,
)
from actors.messages import RowKind

_turn = attrgetter("turn")
_num_drafts = attrgetter("k")


class Scheduler:
    """Rows of a step for requests in order of their turn: (priority, arrival).

    `running` holds a state slot and a block table; `waiting` holds neither. Both are in order of turn.
    Victims are taken from the end of `running` only, so that nobody loses rows already given.
    """

    def __init__(
        self,
        config: GroupConfig,
        *,
        blocks: BlockManager,
        prefix_cache: PrefixCache,
        draft_policy: DraftPolicy,
    ) -> None:
        self.running: list[RequestState] = []
        self.waiting: list[RequestState] = []
        self.num_preemptions = 0
        self._blocks = blocks
        self._prefix_cache = prefix_cache
        self._draft_policy = draft_policy
        self._max_rows = config.max_num_batched_tokens
        self._max_drafts = config.num_speculative_tokens
        self._num_repeated = config.num_mtp_modules
        self._max_rows_of_long_prompt = config.long_prefill_token_threshold or self._max_rows
        self._step_blocks = blocks.blocks_for(config.num_speculative_tokens + 1)
        self._free_slots = list(reversed(range(config.max_num_seqs)))
        self._last_admission = NOT_ADMITTED
        self._victims: list[RequestState] = []
        """Preempted in the step being chosen."""

    def add(self, request: RequestState) -> None:
        insort(self.waiting, request, key=_turn)

    def remove(self, request: RequestState) -> None:
        """The request has ended; its slot and blocks are free for the next message."""
        queue = self.waiting if request.admission == NOT_ADMITTED else self.running
        index = bisect_left(queue, request.turn, key=_turn)
        assert queue[index] is request
        del queue[index]
        if request.admission != NOT_ADMITTED:
            self._withdraw(request)

    def withdraw_all(self) -> None:
        """The shards lost their state: everybody comes back under a new admission number."""
        while self.running:
            self._move_last_to_waiting()

    def schedule(self, outstanding: Iterable[Schedule] = ()) -> Schedule | None:
        """The next step, or None if there is nothing to run before an outstanding step reports.

        Running requests first, in order: a verify, or a chunk of a prompt (or of what a preempted request
        had committed). Drafts and chunks leave a row for every later anchor, and a long prompt leaves rows to
        others that wait for theirs. Then admissions, up to a victim of this step: it would come straight
        back.
        """
        self._victims.clear()
        self._preempt_for_head()
        in_flight = in_flight_by_admission(outstanding)
        anchors_left = sum([r.num_accepted > 0 or _is_ahead(in_flight, r) for r in self.running])
        num_prompts = len(self.running) - anchors_left + len(self.waiting)
        max_chunk = self._max_rows_of_long_prompt if num_prompts > 1 else self._max_rows
        rows_left = self._max_rows
        verifies: list[ScheduledRows] = []
        chunks: list[ScheduledRows] = []
        index = 0
        while rows_left and index < len(self.running):  # victims leave from the end
            request = self.running[index]
            index += 1
            ahead = in_flight.get(request.admission, NOTHING) if in_flight else NOTHING
            if request.num_accepted or ahead.min_tokens:
                anchors_left -= 1
                rows = self._verify(request, ahead, rows_left - anchors_left)
                if rows is not None:
                    verifies.append(rows)
                    rows_left -= rows.num_rows
            else:
                rows = self._chunk(request, ahead, min(max(rows_left - anchors_left, 1), max_chunk), [])
                chunks.append(rows)
                rows_left -= rows.num_rows

        admitted: list[RequestState] = []
        while rows_left and (shared := self._admissible()) is not None:
            rows = self._admit(self.waiting.pop(0), shared, min(rows_left, max_chunk))
            admitted.append(rows.request)
            chunks.append(rows)
            rows_left -= rows.num_rows
        if not verifies and not chunks:
            return None
        verifies.sort(key=_num_drafts, reverse=True)
        return Schedule(verifies, chunks, admitted)

    def _verify(self, request: RequestState, ahead: InFlight, max_rows: int) -> ScheduledRows | None:
        """The anchor and as many drafts as policy, limit, rows and blocks allow; None: not in this step."""
        if ahead.min_tokens and request.waits_for_reports:
            return None
        num_tokens, last = len(request.tokens), request.limit - 1
        lowest, highest = num_tokens + ahead.min_tokens, num_tokens + ahead.max_tokens
        if lowest > last:
            return None
        assert lowest > request.num_published_tokens, "a published block would be written"
        k = self._draft_policy.num_drafts(request) if self._max_drafts else 0
        bound = min(self._max_drafts, last - lowest, max_rows - 1)
        if k > bound:
            k = max(bound, 0)
        new_blocks: list[int] = []
        if highest + k > request.num_reserved_tokens and request.num_reserved_tokens < last:
            if not self._make_room(request, min(highest, last), ahead):
                return None
            reservable = self._blocks.reservable_tokens(request.admission)
            if min(highest + k, last) > reservable:
                k = max(reservable - highest, 0)  # drafts preempt nobody
            new_blocks = self._reserve(request, min(highest + k, last))
        start = UNKNOWN_START if ahead.min_tokens else num_tokens - 1
        return ScheduledRows(request, request.admission, RowKind.VERIFY, k, start, k + 1, 0, new_blocks)

    def _make_room(self, request: RequestState, num_tokens: int, ahead: InFlight) -> bool:
        """Let the anchor's row fit, preempting from the end of `running`; False: the request must wait.

        Nobody is preempted on a guess: a request with steps in flight first waits for their reports.
        """
        while self._blocks.reservable_tokens(request.admission) < num_tokens:
            if ahead is not NOTHING:
                return False
            if self._preempt_last() is request:
                return False
        return True

    def _chunk(
        self, request: RequestState, ahead: InFlight, max_rows: int, new_blocks: list[int]
    ) -> ScheduledRows:
        """The next rows of the committed tokens; the last of them yields the next token."""
        start = request.num_computed + ahead.chunk_rows
        remaining = len(request.tokens) - start
        num_rows = min(remaining, max_rows)
        readonly = min(max(request.num_hit_tokens - start, 0), num_rows)
        first_written = max(start, request.num_hit_tokens)
        assert first_written >= request.num_published_tokens, "a published block would be written"
        kind = RowKind.FINAL_CHUNK if num_rows == remaining else RowKind.MIDDLE_CHUNK
        return ScheduledRows(request, request.admission, kind, 0, start, num_rows, readonly, new_blocks)

    def _preempt_for_head(self) -> None:
        """The head of the line pushes out requests of lower priority, if that lets it in."""
        if not self.waiting or not self.running or self._is_urgent(self.running[-1]):
            return
        shared = self._prefix_cache.find(self.waiting[0])
        num_victims = num_freed = 0
        while not self._fits(self.waiting[0], shared, num_victims, num_freed):
            if num_victims == len(self.running) or self._is_urgent(self.running[-1 - num_victims]):
                return
            num_freed += self._blocks.num_held_alone(self.running[-1 - num_victims].admission)
            num_victims += 1
        for _ in range(num_victims):
            self._preempt_last()

    def _is_urgent(self, request: RequestState) -> bool:
        """Whether a running request's priority is at least that of the head of the line."""
        return request.turn[0] <= self.waiting[0].turn[0]

    def _admissible(self) -> list[int] | None:
        """The cached blocks that the head of the line would begin with; None if it must wait."""
        if not self.waiting or not self._free_slots or self.waiting[0] in self._victims:
            return None
        shared = self._prefix_cache.find(self.waiting[0])
        return shared if self._fits(self.waiting[0], shared, 0, 0) else None

    def _fits(self, request: RequestState, shared: list[int], num_victims: int, num_freed: int) -> bool:
        """All committed tokens must fit, so that a chunk never needs a block later; and beside others, also
        the next verify of everybody: who comes in and is pushed out at once costs its whole prefill.
        """
        num_running = len(self.running) - num_victims
        missing = self._blocks.blocks_for(len(request.tokens)) - len(shared)
        spare = (num_running + 1) * self._step_blocks if num_running else 0
        has_slot = len(self._free_slots) + num_victims > 0
        return has_slot and missing + spare <= self._blocks.num_available(shared) + num_freed

    def _admit(self, request: RequestState, shared: list[int], max_rows: int) -> ScheduledRows:
        self._last_admission += 1
        num_hit_tokens = len(shared) * self._blocks.tokens_per_block
        request.admit(
            self._last_admission,
            self._free_slots.pop(),
            num_hit_tokens=num_hit_tokens,
            num_repeated=self._num_repeated,
        )
        insort(self.running, request, key=_turn)
        self._blocks.open(request.admission, shared)
        self._prefix_cache.admit(request, len(shared))
        table = shared + self._reserve(request, len(request.tokens))
        return self._chunk(request, NOTHING, max_rows, table)

    def _reserve(self, request: RequestState, num_tokens: int) -> list[int]:
        """The blocks added, so that the table covers num_tokens."""
        added = self._blocks.reserve(request.admission, num_tokens)
        request.num_reserved_tokens = self._blocks.reserved_tokens(request.admission)
        return added

    def _preempt_last(self) -> RequestState:
        """Its committed tokens are computed again as a prompt's are; steps in flight no longer count."""
        self.num_preemptions += 1
        victim = self._move_last_to_waiting()
        self._victims.append(victim)
        return victim

    def _move_last_to_waiting(self) -> RequestState:
        request = self.running.pop()
        self._withdraw(request)
        insort(self.waiting, request, key=_turn)
        return request

    def _withdraw(self, request: RequestState) -> None:
        self._blocks.release(request.admission)
        self._free_slots.append(request.slot)
        request.withdraw()


def _is_ahead(in_flight: dict[int, InFlight], request: RequestState) -> bool:
    """Whether the request's final chunk is in flight: what follows is a verify."""
    return request.admission in in_flight and in_flight[request.admission].min_tokens > 0
