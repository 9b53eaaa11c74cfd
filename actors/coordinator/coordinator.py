"""The coordinator: requests in, one message per step out, one report per step back, updates out."""

import logging
import time
from collections.abc import Callable, Iterable

import numpy as np
from tokenizers import Tokenizer

from actors.acceptance import count_emitted
from actors.config import GroupConfig
from actors.coordinator.acceptance_counters import AcceptanceCounters
from actors.coordinator.blocks import BlockManager
from actors.coordinator.draft_policy import DraftPolicy, StepResult, draft_policy_of
from actors.coordinator.drew_nothing import drew_nothing
from actors.coordinator.logprobs import LogprobRows
from actors.coordinator.prefix_cache import PrefixCache
from actors.coordinator.request_limit import checked_limit
from actors.coordinator.request_state import NEVER, NOT_ADMITTED, RequestState
from actors.coordinator.request_update import update_of
from actors.coordinator.schedule import ScheduledRows
from actors.coordinator.scheduler import Scheduler
from actors.coordinator.step_message import build_step_input
from actors.coordinator.steps_in_flight import STEPS_IN_FLIGHT, StepInFlight, StepsInFlight, judged_tokens
from actors.coordinator.suspects import Suspects
from actors.coordinator.timings import Timings
from actors.messages import PENDING_CAPACITY, RowKind, StepInput, StepOutput
from actors.requests import Request, RequestFailed, RequestUpdate, SequenceKey
from actors.stats import GroupStats, queue_parts
from kernels_integration.errors import (
    DuplicateRequestError,
    InvalidRequestError,
    LatentrayError,
    PoisonRequestError,
    shown,
)
from kernels_integration.spans import Spans
from kernels_integration.token_marks import MASKED, NO_TOKEN

logger = logging.getLogger(__name__)


class Coordinator:
    """Decides over plain data; whoever owns the sockets or the shards carries the messages.

    Single-threaded. The caller repeats: `submit` and `abort` as they come, `schedule` -> shards -> `process`,
    `take_updates` -> streams.

    tokenizer: needed for stop strings only. clock: seconds, for statistics and for the cost of drafts.
    draft_policy, max_steps_in_flight: by config, unless given. spans: records "schedule" and "process".
    """

    def __init__(
        self,
        config: GroupConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        draft_policy: DraftPolicy | None = None,
        max_steps_in_flight: int | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self._spans = spans or Spans(is_on=False)
        self._blocks = BlockManager(num_blocks=config.num_kv_blocks, tokens_per_block=config.tokens_per_block)
        self._prefix_cache = PrefixCache(
            self._blocks, is_on=config.enable_prefix_caching, algorithm=config.prefix_caching_hash_algo
        )
        self._draft_policy = draft_policy or draft_policy_of(config)
        self._scheduler = Scheduler(
            config,
            blocks=self._blocks,
            prefix_cache=self._prefix_cache,
            draft_policy=self._draft_policy,
        )
        self._live: dict[SequenceKey, RequestState] = {}
        self._steps = StepsInFlight(max_steps_in_flight or STEPS_IN_FLIGHT[config.scheduling])
        self._updates: list[RequestUpdate | RequestFailed] = []
        self._suspects = Suspects()
        self._held_back: list[RequestState] = []
        """Those that wait for a trial of suspects, out of the scheduler's sight."""
        self._counters = AcceptanceCounters(config.num_speculative_tokens)
        self._num_arrivals = self._num_finished = self._num_aborted = 0
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._num_steps = self._num_rows = 0
        self._num_cache_queries = self._num_cache_hits = 0
        self._timings = Timings(clock)

    @property
    def has_work(self) -> bool:
        """Something is live, or a step has yet to report."""
        return bool(self._live or len(self._steps))

    @property
    def num_outstanding_steps(self) -> int:
        return len(self._steps)

    @property
    def step_age_s(self) -> float:
        """How long the oldest step in flight runs, by the clock; 0 without one."""
        return self._steps.age_s(self._clock())

    def submit(self, request: Request) -> None:
        """Queue a request of one sequence. A key may be used again once its sequence has ended.

        Errors: DuplicateRequestError; InvalidRequestError for a request that could never run.
        """
        if request.key in self._live:
            raise DuplicateRequestError.of(request.request_id)
        limit = checked_limit(request, self._config, self._blocks, has_tokenizer=self._tokenizer is not None)
        self._num_arrivals += 1
        priority = request.priority if self._config.scheduling_policy == "priority" else 0
        turn = (priority, self._num_arrivals)
        state = RequestState(request, turn=turn, limit=limit, tokenizer=self._tokenizer)
        if state.stop.finish_reason is not None:
            raise InvalidRequestError(
                f"the request goes on from {state.num_resumed_tokens} tokens, and ended among them",
                field="progress",
            )
        self._live[request.key] = state
        if self._suspects.waits(request.key):
            self._held_back.append(state)
        else:
            self._scheduler.add(state)
        self._timings.submitted(request.key)
        self._num_prompt_tokens += state.num_prompt_tokens

    def abort(self, keys: Iterable[SequenceKey]) -> None:
        """End sequences in any phase with RequestFailed "aborted"; keys that are not live are ignored.

        Slot and blocks are free at once, also with a step in flight: that step's result no longer counts.
        """
        for key in keys:
            if key in self._live:
                self._fail(self._live[key], "aborted", "the request was aborted")
                self._num_aborted += 1

    def fail_all(self, error: LatentrayError) -> None:
        """End every live request with this error's code (shards lost and not coming back)."""
        for state in list(self._live.values()):
            self._fail(state, error.code, str(error))

    def blame(self) -> bool:
        """The shards were lost at what they did last. True where that has brought the cause nearer.

        The request that is found to be the cause, if any, ends with PoisonRequestError.
        """
        running = [
            rows.request.request.key
            for rows in self._steps.newest_rows
            if rows.request.admission == rows.admission != NOT_ADMITTED
        ]
        if not running:
            return False
        guilty, is_nearer = self._suspects.lost(list(dict.fromkeys(running)))
        if guilty is not None:
            state = self._live[guilty]
            self._fail(
                state,
                PoisonRequestError.code,
                f"request {shown(guilty.request_id)} is rejected: shards were lost again and again while "
                f"they worked on it, at last with no other suspect, at {len(state.tokens)} tokens of prompt "
                "and completion; the shards' logs tell of what they died",
            )
        return is_nearer

    def restart(self, epoch: int) -> None:
        """New shards without state: forget the steps in flight, re-admit live requests as they are."""
        self._steps.begin_epoch(epoch)
        self._timings.interrupted()
        self._scheduler.withdraw_all()
        self._blocks.forget_published()
        self._release_suspects()
        for state in list(self._scheduler.waiting):
            if self._suspects.waits(state.request.key):
                self._scheduler.remove(state)
                self._held_back.append(state)

    def _release_suspects(self) -> None:
        """Let those run that need not wait any more."""
        held_back, self._held_back = self._held_back, []
        for state in held_back:
            if self._suspects.waits(state.request.key):
                self._held_back.append(state)
            else:
                self._scheduler.add(state)

    def schedule(self) -> StepInput | None:
        """The next step for the shards; None if nothing can run or a step in flight must report first."""
        if self._steps.is_full:
            return None
        with self._spans("schedule", self._num_steps + 1):
            return self._next_step()

    def _next_step(self) -> StepInput | None:
        started = self._clock()
        self._draft_policy.begin_step(self._scheduler.running)
        schedule = self._scheduler.schedule(self._steps.schedules)
        if schedule is None:
            return None
        if schedule.admitted:
            self._take_admissions(schedule.admitted)
        self._num_steps += 1
        message = build_step_input(schedule, epoch=self._steps.epoch, step=self._num_steps)
        num_verifies = len(schedule.verifies)
        is_final = [rows.kind is RowKind.FINAL_CHUNK for rows in schedule.chunks]
        self._num_rows += int(message.k.sum()) + num_verifies + len(message.ids)
        yields_token = np.concatenate([np.ones(num_verifies, bool), np.array(is_final, bool)])
        sent_at = self._clock()
        slots = message.slot[:num_verifies]
        self._steps.sent(StepInFlight(self._num_steps, schedule, message.k[yields_token], slots, sent_at))
        self._timings.schedule_s += sent_at - started
        return message

    def process(self, output: StepOutput) -> None:
        """Commit what a step reports. Reports of an older epoch are dropped.

        A result counts only under the admission number that it was sent with: its request may have ended or
        been preempted since.
        Errors: ProtocolError if the report does not answer the oldest step in flight; nothing of it is taken.
        LatentrayError if the shards count other tokens than the coordinator: they have gone apart.
        """
        if output.epoch < self._steps.epoch:
            return
        with self._spans("process", output.step):
            self._process(output)

    def _process(self, output: StepOutput) -> None:
        started = self._clock()
        step = self._steps.reported(output)
        verifies, chunks = step.schedule.verifies, step.schedule.chunks
        drawn = output.tokens if output.rejection is None else judged_tokens(step, output)
        num_emitted = count_emitted(output.drafts, drawn, step.k).tolist()
        tokens, lengths = tuple(drawn.tolist()), output.length.tolist()
        logprobs, prompt_logprobs = LogprobRows(output.logprobs), LogprobRows(output.prompt_logprobs)
        first = 0
        for rows, num, length in zip(verifies, num_emitted, lengths, strict=False):
            request, end = rows.request, first + rows.k + 1
            first_logprob = logprobs.claim(end - first) if request.num_logprobs is not None else 0
            if request.admission == rows.admission:
                emitted = tokens[first : first + num]
                self._distrust_if_failed(request, emitted)
                self._take_verify(rows, tokens[first:end], num, length)
                self._commit(request, emitted, logprobs, first_logprob)
            first = end
        for rows, length in zip(chunks, lengths[len(verifies) :], strict=True):
            request, end = rows.request, first + (rows.kind is RowKind.FINAL_CHUNK)
            first_logprob = logprobs.claim(end - first) if request.num_logprobs is not None else 0
            prompt = request.prompt_logprobs
            num_prompt_rows = prompt.num_rows(rows.start, rows.num_rows) if prompt is not None else 0
            first_prompt_row = prompt_logprobs.claim(num_prompt_rows)
            if request.admission == rows.admission:
                self._distrust_if_failed(request, tokens[first:end])
                self._take_chunk(rows, length)
                if prompt is not None:
                    prompt.add(prompt_logprobs, first_prompt_row, rows.start, num_prompt_rows)
                if end > first:
                    self._commit(request, tokens[first:end], logprobs, first_logprob)
            first = end
        self._observe(step, num_emitted, started)
        self._timings.process_s += self._clock() - started

    def take_updates(self) -> list[RequestUpdate | RequestFailed]:
        """What happened since the last call, in order. A request's last: a finish_reason or a failure."""
        updates, self._updates = self._updates, []
        return updates

    def stats(self) -> GroupStats:
        return GroupStats(
            num_slots=self._config.max_num_seqs,
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._held_back),
            num_used_blocks=self._blocks.num_used,
            num_kv_blocks=self._blocks.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_verifies=self._counters.num_verifies,
            proposed=self._counters.proposed,
            accepted=self._counters.accepted,
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            last_k=self._counters.last_k,
            num_cache_queries=self._num_cache_queries,
            num_cache_hits=self._num_cache_hits,
            phases=self._timings.phases(),
            schedule_s=self._timings.schedule_s,
            step_s=self._timings.step_s,
            process_s=self._timings.process_s,
            queue=queue_parts(
                (state.request.tenant, state.request.priority, len(state.tokens))
                for state in (*self._scheduler.waiting, *self._held_back)
            ),
        )

    def _take_admissions(self, admitted: list[RequestState]) -> None:
        self._draft_policy.admitted([request.slot for request in admitted])
        for request in admitted:
            self._timings.admitted(request.request.key)
            if self._config.enable_prefix_caching and request.prompt_logprobs is None:
                self._num_cache_queries += len(request.tokens)
                self._num_cache_hits += request.num_hit_tokens

    def _observe(self, step: StepInFlight, num_emitted: list[int], reported_at: float) -> None:
        """Statistics, and what the choice of k learns from."""
        seconds = self._timings.step_reported(step.sent_at, reported_at, goes_on=self.has_work)
        num_verifies = len(step.schedule.verifies)
        result = StepResult(
            slots=step.slots,
            k=step.k[:num_verifies].astype(np.int64),
            accepted=np.maximum(np.array(num_emitted[:num_verifies], np.int64) - 1, 0),
            has_chunks=bool(step.schedule.chunks),
            seconds=seconds,
        )
        if num_verifies:
            self._counters.last_k = tuple(np.bincount(result.k).tolist())
        self._draft_policy.observe(result)

    def _take_verify(
        self, rows: ScheduledRows, tokens: tuple[int, ...], num_emitted: int, length: int
    ) -> None:
        """Count, and publish what is complete now: its tokens were committed before this step (mtp.md 6)."""
        request, k = rows.request, rows.k
        num_computed = len(request.tokens)
        if length != num_computed - 1 + num_emitted:
            raise _wrong_length(request, length, num_computed - 1 + num_emitted)
        if k:
            if tokens[-1] == MASKED:
                k -= tokens.count(MASKED)
            request.num_draft_tokens += k
            request.num_accepted_tokens += num_emitted - 1
            request.num_pending = num_emitted
        elif self._config.num_speculative_tokens:  # no fill: the MTP layer's KV is still missing
            request.num_pending += num_emitted
            num_computed = 0
            if request.num_pending > PENDING_CAPACITY:
                request.publish_at = NEVER
        self._counters.add(k, num_emitted - 1)
        if num_computed >= request.publish_at:
            self._prefix_cache.publish(request, num_computed)

    def _take_chunk(self, rows: ScheduledRows, length: int) -> None:
        request, end = rows.request, rows.start + rows.num_rows
        if length != end:
            raise _wrong_length(request, length, end)
        request.num_computed = end
        request.num_pending = 1
        if end >= request.publish_at:
            self._prefix_cache.publish(request, end)

    def _distrust_if_failed(self, request: RequestState, emitted: tuple[int, ...]) -> None:
        """KV whose last row led to nothing finite is nobody else's prefix."""
        if emitted and emitted[-1] == NO_TOKEN:
            request.publish_at = NEVER

    def _commit(
        self, state: RequestState, emitted: tuple[int, ...], logprobs: LogprobRows, first_row: int
    ) -> None:
        """Append what a step emitted. NO_TOKEN, which stands last if at all, fails the request."""
        if emitted and emitted[-1] == NO_TOKEN:
            if len(emitted) > 1:
                self._commit(state, emitted[:-1], logprobs, first_row)
            if state.request.key in self._live:
                self._fail(state, *drew_nothing(state))
            return
        try:
            kept = state.commit(emitted)
        except Exception as error:  # such as of the tokenizer: no other request shall end with this one
            logger.exception("a request failed when its tokens were committed")
            self._fail(state, LatentrayError.code, f"its tokens could not be read: {type(error).__name__}")
            return
        self._num_generated_tokens += len(kept)
        key = state.request.key
        if len(kept) == len(state.tokens) - state.num_prompt_tokens - state.num_resumed_tokens:
            self._timings.first_token(key)
        is_last = state.stop.finish_reason is not None
        phases = self._timings.finished(key) if is_last else None
        self._updates.append(update_of(state, kept, logprobs, first_row, phases))
        if is_last:
            self._end(state)
            self._num_finished += 1
        elif self._suspects and self._suspects.got_token(key):
            self._release_suspects()

    def _fail(self, state: RequestState, code: str, message: str) -> None:
        self._end(state)
        self._updates.append(RequestFailed.of(state.request.key, code, message))

    def _end(self, state: RequestState) -> None:
        del self._live[state.request.key]
        self._timings.ended(state.request.key)
        if state in self._held_back:
            self._held_back.remove(state)
        else:
            self._scheduler.remove(state)
        if self._suspects and self._suspects.clear(state.request.key):
            self._release_suspects()


def _wrong_length(request: RequestState, length: int, expected: int) -> LatentrayError:
    """The shards' own count of a request's tokens must equal the coordinator's."""
    return LatentrayError(
        f"request {request.request.request_id!r}: the shards hold {length} tokens; expected {expected}"
    )
