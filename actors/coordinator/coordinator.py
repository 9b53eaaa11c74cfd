"""The coordinator: requests in, one message per step out, one report per step back, updates out."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tokenizers import Tokenizer

from actors.config import GroupConfig
from actors.coordinator.blocks import BlockManager
from actors.coordinator.logprobs import LogprobRows
from actors.coordinator.rejection import MASKED, AcceptanceCounters, accept
from actors.coordinator.request_state import RequestState
from actors.coordinator.scheduler import DraftPolicy, ScheduledRows, Scheduler
from actors.coordinator.step_message import build_step_input
from actors.messages import RowKind, StepInput, StepOutput
from actors.requests import Request, RequestFailed, RequestUpdate
from actors.stats import GroupStats
from kernels_integration.errors import DuplicateRequestError, InvalidRequestError, LatentrayError

_MAX_STEPS_IN_FLIGHT = 1
"""Synchronous: the next step is chosen when the last has reported."""


@dataclass(frozen=True, slots=True)
class _OutstandingStep:
    step: int
    rows: list[ScheduledRows]
    sent_at: float


class Coordinator:
    """Decides over plain data; whoever owns the sockets or the shards carries the messages.

    Single-threaded. The caller repeats: `submit` and `abort` as they come, `schedule` -> shards -> `process`,
    `take_updates` -> streams.

    tokenizer: needed for stop strings only. clock: seconds, for statistics. draft_policy: drafts to
    propose for a request in a step, of at most num_speculative_tokens; that many by default.
    """

    def __init__(
        self,
        config: GroupConfig,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
        draft_policy: DraftPolicy | None = None,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._clock = clock
        self._blocks = BlockManager(num_blocks=config.num_kv_blocks, tokens_per_block=config.tokens_per_block)
        self._scheduler = Scheduler(
            blocks=self._blocks,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            num_speculative_tokens=config.num_speculative_tokens,
            draft_policy=draft_policy or (lambda _request: config.num_speculative_tokens),
        )
        self._live: dict[str, RequestState] = {}
        self._outstanding: deque[_OutstandingStep] = deque()
        self._updates: list[RequestUpdate | RequestFailed] = []
        self._epoch = 0
        self._counters = AcceptanceCounters(config.num_speculative_tokens)
        self._num_arrivals = self._num_finished = self._num_aborted = 0
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._num_steps = self._num_rows = 0
        self._schedule_s = self._step_s = self._process_s = 0.0

    @property
    def has_work(self) -> bool:
        """Something is live, or a step has yet to report."""
        return bool(self._live or self._outstanding)

    @property
    def num_outstanding_steps(self) -> int:
        return len(self._outstanding)

    def submit(self, request: Request) -> None:
        """Queue a request. An id may be used again once its request has ended.

        Errors: DuplicateRequestError; InvalidRequestError for a request that could never run.
        """
        request_id = request.request_id
        if request_id in self._live:
            raise DuplicateRequestError(
                f"request id {request_id!r} belongs to a live request; ids must differ: "
                "choose another, or wait until that request has ended"
            )
        limit = self._checked_limit(request)
        self._num_arrivals += 1
        state = RequestState(request, arrival=self._num_arrivals, limit=limit, tokenizer=self._tokenizer)
        self._live[request_id] = state
        self._scheduler.add(state)
        self._num_prompt_tokens += state.num_prompt_tokens

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any phase with RequestFailed "aborted"; ids that are not live are ignored.

        Slot and blocks are free at once, also with a step in flight: that step's result no longer counts.
        """
        for request_id in request_ids:
            if request_id in self._live:
                self._fail(self._live[request_id], "aborted", "the request was aborted")
                self._num_aborted += 1

    def fail_all(self, error: LatentrayError) -> None:
        """End every live request with this error's code (shards lost and not coming back)."""
        for state in list(self._live.values()):
            self._fail(state, error.code, str(error))

    def restart(self, epoch: int) -> None:
        """New shards without state: forget the steps in flight, re-admit live requests as they are."""
        assert epoch > self._epoch, (epoch, self._epoch)
        self._epoch = epoch
        self._outstanding.clear()
        self._scheduler.withdraw_all()

    def schedule(self) -> StepInput | None:
        """The next step for the shards; None if nothing can run or a step in flight must report first."""
        if len(self._outstanding) >= _MAX_STEPS_IN_FLIGHT:
            return None
        started = self._clock()
        schedule = self._scheduler.schedule()
        if schedule is None:
            return None
        self._num_steps += 1
        self._num_rows += sum(rows.num_rows for rows in schedule.rows)
        message = build_step_input(schedule, epoch=self._epoch, step=self._num_steps)
        sent_at = self._clock()
        self._outstanding.append(_OutstandingStep(self._num_steps, schedule.rows, sent_at))
        self._schedule_s += sent_at - started
        return message

    def process(self, output: StepOutput) -> None:
        """Commit what a step reports. Reports of an older epoch are dropped.

        Errors: LatentrayError if the report does not answer the oldest step in flight.
        """
        if output.epoch < self._epoch:
            return
        started = self._clock()
        step = self._checked_step(output)
        self._outstanding.popleft()
        drafts, tokens = output.drafts.tolist(), output.tokens.tolist()
        logprobs, prompt_logprobs = LogprobRows(output.logprobs), LogprobRows(output.prompt_logprobs)
        draft_start = token_start = 0
        for rows, length in zip(step.rows, output.length.tolist(), strict=True):
            draft_end = draft_start + rows.k
            token_end = token_start + (rows.kind is not RowKind.MIDDLE_CHUNK) * (rows.k + 1)
            params, prompt = rows.request.request.params, rows.request.prompt_logprobs
            first_row = logprobs.claim(token_end - token_start) if params.logprobs is not None else 0
            num_prompt_rows = 0
            if prompt is not None and rows.kind is not RowKind.VERIFY:
                num_prompt_rows = prompt.num_rows(rows.start, rows.num_rows)
            first_prompt_row = prompt_logprobs.claim(num_prompt_rows)
            if rows.request.admission == rows.admission:  # else it ended, or was preempted, since
                row_tokens = tokens[token_start:token_end]
                emitted = accept(drafts[draft_start:draft_end], row_tokens)
                self._check_length(rows, len(emitted), length)
                if rows.kind is not RowKind.VERIFY:
                    rows.request.num_computed += rows.num_rows
                elif rows.k:
                    self._count(rows, row_tokens, len(emitted) - 1)
                else:
                    self._counters.add(0, 0)
                if prompt is not None and num_prompt_rows:
                    prompt.add(prompt_logprobs, first_prompt_row, rows.start, num_prompt_rows)
                if emitted:
                    self._commit(rows.request, emitted, logprobs, first_row)
            draft_start, token_start = draft_end, token_end
        self._step_s += started - step.sent_at
        self._process_s += self._clock() - started

    def take_updates(self) -> list[RequestUpdate | RequestFailed]:
        """What happened since the last call, in order. A request's last: a finish_reason or a failure."""
        updates, self._updates = self._updates, []
        return updates

    def stats(self) -> GroupStats:
        return GroupStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            num_used_blocks=self._blocks.num_used,
            num_kv_blocks=self._blocks.num_blocks,
            num_preemptions=self._scheduler.num_preemptions,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_verifies=self._counters.num_verifies,
            proposed=tuple(self._counters.proposed),
            accepted=tuple(self._counters.accepted),
            num_steps=self._num_steps,
            num_rows=self._num_rows,
            schedule_s=self._schedule_s,
            step_s=self._step_s,
            process_s=self._process_s,
        )

    def _checked_limit(self, request: Request) -> int:
        """Tokens of prompt and completion at most; refuses what could never run."""
        prompt_len, params = len(request.prompt_token_ids), request.params
        max_model_len = self._config.max_model_len
        if not 0 < prompt_len < max_model_len:
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens; it must have 1 to {max_model_len - 1}: one more must "
                f"fit max-model-len {max_model_len}; change the prompt, or serve with a larger max-model-len",
                field="prompt_token_ids",
            )
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                f"stop is {params.stop!r}; stop strings need a tokenizer, which this group does not have; "
                "use stop_token_ids, or start the group with a tokenizer",
                field="stop",
            )
        limit = max_model_len
        if params.max_tokens is not None:
            limit = min(limit, prompt_len + params.max_tokens)
        num_blocks = self._blocks.blocks_for(limit - 1)
        if num_blocks > self._blocks.num_blocks:
            tokens = self._blocks.num_blocks * self._blocks.tokens_per_block + 1
            raise InvalidRequestError(
                f"{prompt_len} prompt tokens and max_tokens {params.max_tokens} need {num_blocks} KV blocks; "
                f"the group has {self._blocks.num_blocks}, for {tokens} tokens of prompt and completion; "
                "lower max_tokens, shorten the prompt, or serve with more num-kv-blocks",
                field="max_tokens",
            )
        return limit

    def _checked_step(self, output: StepOutput) -> _OutstandingStep:
        oldest = self._outstanding[0] if self._outstanding else None
        if oldest is None or output.epoch != self._epoch or output.step != oldest.step:
            expected = f"epoch {self._epoch} step {oldest.step}" if oldest else "nothing"
            raise LatentrayError(
                f"the shards reported epoch {output.epoch} step {output.step}; expected {expected}"
            )
        num_drafts = sum(rows.k for rows in oldest.rows)
        num_tokens = num_drafts + sum(rows.kind is not RowKind.MIDDLE_CHUNK for rows in oldest.rows)
        sizes = (len(output.drafts), len(output.tokens), len(output.length))
        if sizes != (num_drafts, num_tokens, len(oldest.rows)):
            raise LatentrayError(
                f"step {oldest.step}: the shards reported {sizes} drafts, tokens and lengths; "
                f"expected {(num_drafts, num_tokens, len(oldest.rows))}"
            )
        return oldest

    def _check_length(self, rows: ScheduledRows, num_emitted: int, length: int) -> None:
        """The shards' own count of a request's tokens must equal the coordinator's."""
        expected = rows.start + (num_emitted if rows.kind is RowKind.VERIFY else rows.num_rows)
        if length != expected:
            raise LatentrayError(
                f"request {rows.request.request.request_id!r}: the shards hold {length} tokens; "
                f"expected {expected}"
            )

    def _count(self, rows: ScheduledRows, row_tokens: list[int], num_accepted: int) -> None:
        num_proposed = len(row_tokens) - row_tokens.count(MASKED) - 1
        self._counters.add(num_proposed, num_accepted)
        rows.request.num_draft_tokens += num_proposed
        rows.request.num_accepted_tokens += num_accepted

    def _commit(self, state: RequestState, emitted: list[int], logprobs: LogprobRows, first_row: int) -> None:
        kept = state.commit(emitted)
        self._num_generated_tokens += len(kept)
        num_top = state.request.params.logprobs
        self._updates.append(
            RequestUpdate(
                request_id=state.request.request_id,
                token_ids=tuple(kept),
                logprobs=logprobs.of(kept, first_row, num_top) if num_top is not None else (),
                prompt_logprobs=state.prompt_logprobs.take() if state.prompt_logprobs else (),
                finish_reason=state.finish_reason,
                matched_stop=state.stop.matched_stop,
                num_prompt_tokens=state.num_prompt_tokens,
                num_completion_tokens=state.num_completion_tokens,
                num_draft_tokens=state.num_draft_tokens,
                num_accepted_tokens=state.num_accepted_tokens,
            )
        )
        if state.finish_reason is not None:
            self._end(state)
            self._num_finished += 1

    def _fail(self, state: RequestState, code: str, message: str) -> None:
        self._end(state)
        self._updates.append(RequestFailed(request_id=state.request.request_id, code=code, message=message))

    def _end(self, state: RequestState) -> None:
        del self._live[state.request.request_id]
        self._scheduler.remove(state)
