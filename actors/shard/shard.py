"""One shard executes steps: draft, verify, sample, report, prompt fill (contracts/mtp.md 2).

Everything a message asks for happens here, at its place in step order; nothing is decided here but
which drafts are accepted, by the same pure function as in the coordinator: so the next step need not
wait for it. All ranks of a group execute the same step and agree on every token by construction.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.config import GroupConfig
from actors.messages import PENDING_CAPACITY, StepInput, StepOutput, TokenLogprobs
from actors.model.model import Model
from actors.shard.block_tables import BlockTables
from actors.shard.mtp_modules import MtpModules
from actors.shard.pending import PendingRows
from actors.shard.progress import SlotProgress
from actors.shard.prompt_logprobs import PromptLogprobs
from actors.shard.samplers import Verified, make_sampler
from actors.shard.sampling_state import SamplingState
from actors.shard.step_rows import StepRows
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import PlanError
from kernels_integration.kv_cache import KVCache
from kernels_integration.logprobs import Logprobs
from kernels_integration.rows import RowBatch
from kernels_integration.spans import Span, Spans

Int64s = NDArray[np.int64]


class Shard:
    """The state of one rank: model slice, KV cache, block tables, waiting hidden states.

    Errors: PlanError when a message would read or write outside its request's blocks;
    CollectiveError when a peer is gone.
    """

    def __init__(
        self,
        config: GroupConfig,
        model: Model,
        cache: KVCache,
        *,
        tp: Collectives,
        dcp: DcpGroup,
        spans: Spans,
    ) -> None:
        self._config = config
        self._model = model
        self._cache = cache
        self._tp = tp
        self._spans = spans
        self._tables = BlockTables(
            num_slots=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_kv_blocks=config.num_kv_blocks,
            dcp=dcp,
        )
        vocabulary = {
            "vocab_start": model.vocab_start,
            "slice_size": -(-model.config.vocab_size // tp.size),
        }
        self._sampling = SamplingState(config.max_num_seqs, **vocabulary)
        self._sampler = make_sampler(config, self._sampling, model.vocab_start, tp)
        self._prompt_logprobs = PromptLogprobs(**vocabulary)
        self._pending = PendingRows(
            num_slots=config.max_num_seqs if config.num_speculative_tokens else 0,
            capacity=PENDING_CAPACITY,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
        )
        self._mtp_modules = MtpModules(
            model, num_slots=config.max_num_seqs, run=self._mtp, make_rows=self._mtp_rows
        )
        self._progress = SlotProgress(config.max_num_seqs)

    @torch.inference_mode()
    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        """Run one step. On rank 0 `report` is called as soon as its tokens are known.

        The prompt fill follows the report, off the critical path, and ends before the next step.
        """
        try:
            self._execute(step, report)
        except PlanError as error:
            raise PlanError(f"step {step.step}, rank {self._tp.rank}: {error}") from error

    def _execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        self._apply(step)
        rows = StepRows.of(step, self._progress)
        with self._spans("draft"):
            drafts = self._draft(rows)
        with self._spans("verify"):
            hidden = self._verify(step, rows, drafts)
        with self._spans("sampling"):
            verified = self._sample(rows, hidden, drafts)
            prompt_logprobs = self._prompt_logprobs.of_step(rows, hidden, self._model.logits, self._tp)
        tokens, judgement = verified.tokens, verified.judgement
        num_emitted = rows.num_emitted(drafts.numpy(), tokens)
        lengths = rows.lengths(num_emitted)
        if self._tp.rank == 0:
            report(
                StepOutput(
                    epoch=step.epoch,
                    step=step.step,
                    drafts=drafts.numpy().astype(np.int32),
                    tokens=tokens.astype(np.int32) if judgement is None else np.empty(0, np.int32),
                    length=lengths,
                    logprobs=_logprobs_message(verified.logprobs),
                    prompt_logprobs=_logprobs_message(prompt_logprobs),
                    judgement=judgement,
                )
            )
        self._progress.advance(rows.slots, lengths)
        if self._config.num_speculative_tokens:
            with self._spans("prompt_fill"):
                self._fill_prompt(step, rows, hidden)
        self._take_emitted(rows, num_emitted, tokens, hidden)

    def take_spans(self) -> list[Span]:
        """Where the time went since the last call; empty unless the group is traced."""
        return self._spans.take()

    def _apply(self, step: StepInput) -> None:
        """Admissions and new blocks."""
        for admission in step.admit:
            self._tables.reset(admission.slot)
            self._sampling.admit(admission)
            self._prompt_logprobs.admit(admission)
            self._progress.admit(admission)
            if self._config.num_speculative_tokens:
                self._pending.reset(admission.slot)
        for i in np.flatnonzero(np.diff(step.new_blocks_indptr)).tolist():
            begin, end = step.new_blocks_indptr[i : i + 2].tolist()
            self._tables.append(int(step.slot[i]), step.new_blocks[begin:end])

    def _draft(self, rows: StepRows) -> Tensor:
        """[sum k] int64 draft tokens, packed by request: from pending rows, then from the drafted ones."""
        if not rows.fill.any():
            return torch.empty(0, dtype=torch.int64)
        anchor_states = self._fill(rows)
        num_modules = self._mtp_modules.num_modules
        states = anchor_states[0].unsqueeze(1)
        num_drafting, k_max = rows.num_drafting(0), int(rows.k[0])
        drafts = torch.empty(num_drafting, k_max, dtype=torch.int64)
        for i in range(k_max):
            active = rows.num_drafting(i)
            slots, anchors = rows.slots[:active], rows.starts[:active]
            with self._spans("sampling"):
                logits = self._model.logits(states[:active, -1])
                drafts[:active, i] = self._sampler.draft(logits, slots, anchors + i + 1, drafts[:active, :i])
            following, num_rows = rows.num_drafting(i + 1), min(i + 1, num_modules)
            if following:
                slots, anchors = rows.slots[:following], rows.starts[:following]
                drafted = drafts[:following, i + 1 - num_rows : i + 1]
                states = self._mtp_modules.run_drafted(i + 1, slots, anchors, drafted, states[:following])
                if i + 1 < num_modules:  # the next module has yet to see the first draft
                    states = torch.cat((anchor_states[i + 1][:following].unsqueeze(1), states), dim=1)
        if num_drafting and rows.k[num_drafting - 1] == k_max:
            return drafts.reshape(-1)
        return drafts[torch.arange(k_max) < torch.from_numpy(rows.k[:num_drafting, None])]

    def _fill(self, rows: StepRows) -> list[Tensor]:
        """Run the MTP modules over the pending rows; per module the states of the drafting requests' anchors.

        Requests are ordered by their number of pending rows, so that equal ones form one row group.
        """
        slots = rows.slots[: rows.num_verifies][rows.fill]
        counts = self._pending.counts(slots)
        order = np.argsort(counts, kind="stable")
        order = order[counts[order] > 0]  # without rows: complete, only the coordinator has not heard of it
        if not len(order):
            nothing = torch.zeros(
                rows.num_drafting(0), self._model.config.hidden_size, dtype=self._model.dtype
            )
            return [nothing] * self._mtp_modules.num_modules
        fill = self._pending.take(slots[order])
        last_states = self._mtp_modules.fill(
            slots[order], fill.starts, fill.counts, fill.token_ids, fill.hidden
        )
        place = np.zeros_like(slots)
        place[order] = np.arange(len(order))
        drafting = torch.from_numpy(place[: rows.num_drafting(0)])
        return [states[drafting] for states in last_states]

    def _verify(self, step: StepInput, rows: StepRows, drafts: Tensor) -> Tensor:
        """[T, hidden] states of the target over anchors, drafts and chunk rows, in one forward."""
        token_ids = torch.empty(rows.num_rows, dtype=torch.int64)
        verify_rows = np.arange(rows.num_verify_rows)
        anchor_rows = np.cumsum(rows.k + 1) - (rows.k + 1)
        anchors = self._progress.anchors(rows.slots[: rows.num_verifies])
        token_ids[torch.from_numpy(anchor_rows)] = torch.from_numpy(anchors)
        token_ids[torch.from_numpy(np.setdiff1d(verify_rows, anchor_rows, assume_unique=True))] = drafts
        token_ids[rows.num_verify_rows :] = torch.from_numpy(step.ids.astype(np.int64))
        row_batch = self._tables.rows(
            rows.slots, rows.starts, rows.counts, limits=rows.limits, readonly=rows.readonly
        )
        return self._model.forward(token_ids, row_batch, self._cache)

    def _sample(self, rows: StepRows, hidden: Tensor, drafts: Tensor) -> Verified:
        """The tokens of every verify row and of every final chunk."""
        target_rows, _, _ = rows.sampled_rows()
        if len(target_rows) < len(hidden):
            hidden = hidden[torch.from_numpy(target_rows)]
        return self._sampler.verify(self._model.logits(hidden), rows, drafts)

    def _fill_prompt(self, step: StepInput, rows: StepRows, hidden: Tensor) -> None:
        """Run the MTP modules over the chunks' own rows: slot p from h[p-1] and t[p]; slot 0 stays empty.

        The first row after a prefix hit gives only its h: nobody has the state before it. The rows of the hit
        that follow are run, in whichever chunks they come, for the states that later modules need.
        """
        chunks = slice(rows.num_verifies, None)
        slots, starts, counts = rows.slots[chunks], rows.starts[chunks], rows.counts[chunks]
        is_carried = self._pending.is_carried(slots, starts)
        firsts = np.where(is_carried, starts, starts + 1)
        fills = starts + counts - firsts
        if not fills.sum():
            return
        chunk_hidden = hidden[rows.num_verify_rows :]
        first_rows = np.cumsum(counts) - counts
        request = np.repeat(np.arange(len(slots)), fills)
        positions = firsts[request] + np.arange(len(request)) - (np.cumsum(fills) - fills)[request]
        offsets = positions - starts[request]
        previous = first_rows[request] + offsets - 1
        continued = np.flatnonzero(is_carried)
        if len(continued):
            carried_row = np.zeros(len(slots), np.int64)
            carried_row[continued] = len(chunk_hidden) + np.arange(len(continued))
            previous = np.where(offsets == 0, carried_row[request], previous)
            carried = self._pending.take_carried(slots[continued])
            chunk_hidden = torch.cat([chunk_hidden, carried])
        token_ids = torch.from_numpy(step.ids.astype(np.int64)[first_rows[request] + offsets])
        filled = fills > 0
        self._mtp_modules.fill(
            slots[filled],
            firsts[filled],
            fills[filled],
            token_ids,
            chunk_hidden[torch.from_numpy(previous)],
            readonly=np.maximum(rows.readonly[chunks] - (firsts - starts), 0)[filled],
        )

    def _take_emitted(self, rows: StepRows, num_emitted: Int64s, tokens: Int64s, hidden: Tensor) -> None:
        """The step's tokens are accepted here and now: the coordinator will come to the same ones.

        Their states wait for the MTP layer, as does the last state of each middle chunk.
        """
        emitted = rows.emitted(num_emitted)
        # A request that drew nothing has failed; steps sent before that is known go on from any legal token.
        accepted, ends = np.maximum(tokens[emitted], 0).astype(np.int32), np.cumsum(num_emitted)
        yielding = np.flatnonzero(num_emitted)
        self._progress.emit(rows.token_slots[yielding], accepted[ends[yielding] - 1])
        for slot, begin, end in zip(
            rows.token_slots.tolist(), (ends - num_emitted).tolist(), ends.tolist(), strict=True
        ):
            self._sampling.append(slot, accepted[begin:end])
        if not self._config.num_speculative_tokens:
            return
        target_rows, _, _ = rows.sampled_rows()
        self._pending.store(
            rows.token_slots,
            rows.token_starts,
            num_emitted,
            accepted,
            hidden[torch.from_numpy(target_rows[emitted])],
        )
        if rows.middle.any():
            last_rows = np.cumsum(rows.counts)[rows.middle] - 1
            following = (rows.starts + rows.counts)[rows.middle]
            self._pending.carry(rows.slots[rows.middle], following, hidden[torch.from_numpy(last_rows)])

    def _mtp_rows(
        self, module: int, slots: Int64s, starts: Int64s, counts: Int64s, readonly: Int64s | None
    ) -> RowBatch:
        return self._tables.rows(
            slots,
            starts,
            counts,
            limits=self._progress.limits(slots),
            visible_from=self._pending.mtp_from(slots) + module,
            readonly=readonly,
        )

    def _mtp(self, module: int, token_ids: Tensor, previous: Tensor, rows: RowBatch) -> Tensor:
        return self._model.mtp_forward(token_ids, previous, rows, self._cache, module=module)


def _logprobs_message(logprobs: Logprobs | None) -> TokenLogprobs | None:
    if logprobs is None:
        return None
    return TokenLogprobs(
        sampled=logprobs.sampled.numpy().astype(np.float32),
        top_ids=logprobs.top_ids.numpy().astype(np.int32).reshape(-1),
        top_values=logprobs.top_values.numpy().astype(np.float32).reshape(-1),
        num_top=logprobs.top_ids.shape[1],
    )
