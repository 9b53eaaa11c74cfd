"""One shard executes steps: draft, verify, sample, report, prompt fill (contracts/mtp.md 2).

Everything a message asks for happens here, at its place in step order; nothing is decided here but
which drafts are accepted, by the same pure function as in the coordinator: so the next step need not
wait for it. All ranks of a group execute the same step and agree on every token by construction.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.config import GroupConfig
from actors.grammar.compiler import GrammarCompiler
from actors.messages import PENDING_CAPACITY, StepInput, StepOutput
from actors.model.model import Model
from actors.shard.block_tables import BlockTables
from actors.shard.boundary import Boundary
from actors.shard.locating import locating
from actors.shard.logprobs_message import logprobs_message
from actors.shard.mtp_modules import MtpModules
from actors.shard.one_arithmetic import require_one_arithmetic
from actors.shard.pending import PendingRows
from actors.shard.prompt_fill import PromptFill
from actors.shard.prompt_logprobs import PromptLogprobs
from actors.shard.samplers import Drafts, Verified, make_sampler
from actors.shard.sampling_state import SamplingState
from actors.shard.slot_lengths import SlotLengths
from actors.shard.slot_rows import SlotRows
from actors.shard.step_rows import StepRows
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_cache import KVCache
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
        self._boundary = boundary = Boundary(model.backend.device)
        self._tables = BlockTables(
            num_slots=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_kv_blocks=config.num_kv_blocks,
            dcp=dcp,
            boundary=boundary,
        )
        slice_size = len(config.topology.vocabulary(model.config.vocab_size, tp.rank))
        self.compiler = GrammarCompiler(config.model_path, model.config.vocab_size)
        self._sampling = SamplingState(
            config.max_num_seqs,
            vocab_start=model.vocab_start,
            slice_size=slice_size,
            boundary=boundary,
            compiler=self.compiler,
        )
        self._sampler = make_sampler(config, self._sampling, model.vocab_start, tp, boundary)
        self._prompt_logprobs = PromptLogprobs(
            vocab_start=model.vocab_start, slice_size=slice_size, boundary=boundary
        )
        self._pending = PendingRows(
            num_slots=config.max_num_seqs if config.num_speculative_tokens else 0,
            capacity=PENDING_CAPACITY,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            boundary=boundary,
        )
        self._lengths = SlotLengths(config.max_num_seqs)
        self._slot_rows = SlotRows(self._tables, self._lengths, self._pending)
        self._mtp_modules = MtpModules(
            model, cache, self._slot_rows, num_slots=config.max_num_seqs, boundary=boundary
        )

    @torch.inference_mode()
    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        """Run one step. On rank 0 `report` is called as soon as its tokens are known.

        The prompt fill follows the report, off the critical path, and ends before the next step.
        """
        with locating(step.step, self._tp.rank):
            self._execute(step, report)

    def _execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        self._apply(step)
        rows = StepRows.of(step, self._lengths)
        with self._spans("draft"):
            drafts = self._draft(rows)
        with self._spans("verify"):
            hidden = self._verify(step, rows, drafts)
        with self._spans("sampling"):
            verified = self._sample(rows, hidden, drafts)
            prompt_logprobs = self._prompt_logprobs.of_step(rows, hidden, self._model.logits, self._tp)
        tokens, rejection = verified.tokens, verified.rejection
        num_emitted = rows.num_emitted(drafts.on_host, tokens)
        lengths = rows.lengths(num_emitted)
        if self._tp.rank == 0:
            report(
                StepOutput(
                    epoch=step.epoch,
                    step=step.step,
                    drafts=drafts.on_host.astype(np.int32),
                    tokens=tokens.astype(np.int32) if rejection is None else np.empty(0, np.int32),
                    length=lengths,
                    logprobs=logprobs_message(verified.logprobs, self._boundary),
                    prompt_logprobs=logprobs_message(prompt_logprobs, self._boundary),
                    rejection=rejection,
                )
            )
        self._lengths.advance(rows.slots, lengths)
        if self._config.num_speculative_tokens:
            with self._spans("prompt_fill"):
                self._fill_prompt(step, rows, hidden)
        self._take_emitted(rows, num_emitted, tokens, hidden)

    def rejoin(self) -> None:
        """Be one of a new set of ranks, some of which are built now: by the collectives of `build_shard`.

        Slots need no reset: each is admitted anew, and that resets all of its state.
        """
        require_one_arithmetic(self._model.backend, self._tp)

    def settle(self, *, wait: bool) -> bool:
        """Every step is reported before `execute` returns."""
        return True

    def take_spans(self) -> list[Span]:
        """Where the time went since the last call; empty unless the group is traced."""
        return self._spans.take()

    def _apply(self, step: StepInput) -> None:
        """Admissions and new blocks."""
        for admission in step.admit:
            self._tables.reset(admission.slot)
            self._sampling.admit(admission)
            self._prompt_logprobs.admit(admission)
            self._lengths.admit(admission)
            if self._config.num_speculative_tokens:
                self._pending.reset(admission.slot)
        for i in np.flatnonzero(np.diff(step.new_blocks_indptr)).tolist():
            begin, end = step.new_blocks_indptr[i : i + 2].tolist()
            self._tables.append(int(step.slot[i]), step.new_blocks[begin:end])

    def _draft(self, rows: StepRows) -> Drafts:
        """Draft tokens of all verifies, from pending rows, then from the drafted ones."""
        if not rows.fill.any():
            return self._packed(torch.empty(0, dtype=torch.int64, device=self._boundary.device))
        anchor_states = self._fill(rows)
        num_modules = self._mtp_modules.num_modules
        states = anchor_states[0].unsqueeze(1)
        num_drafting, k_max = rows.num_drafting(0), int(rows.k[0])
        drafts = torch.empty(num_drafting, k_max, dtype=torch.int64, device=self._boundary.device)
        probabilities = []
        for i in range(k_max):
            active = rows.num_drafting(i)
            slots, anchors = rows.slots[:active], rows.starts[:active]
            with self._spans("sampling"):
                logits = self._model.logits(states[:active, -1])
                draft = self._sampler.draft(logits, slots, anchors + i + 1, drafts[:active, :i])
            drafts[:active, i] = draft.tokens
            if draft.probability is not None:
                probabilities.append(draft.probability)
            following, num_rows = rows.num_drafting(i + 1), min(i + 1, num_modules)
            if following:
                slots, anchors = rows.slots[:following], rows.starts[:following]
                drafted = drafts[:following, i + 1 - num_rows : i + 1]
                states = self._mtp_modules.run_drafted(i + 1, slots, anchors, drafted, states[:following])
                if i + 1 < num_modules:  # the next module has yet to see the first draft
                    states = torch.cat((anchor_states[i + 1][:following].unsqueeze(1), states), dim=1)
        taken = np.flatnonzero(np.arange(k_max) < rows.k[:num_drafting, None])
        return self._packed(drafts.view(-1)[self._boundary.up(taken)], probabilities)

    def _packed(self, tokens: Tensor, probabilities: Sequence[Tensor] = ()) -> Drafts:
        return Drafts(tokens=tokens, on_host=self._boundary.down(tokens), probabilities=tuple(probabilities))

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
                rows.num_drafting(0),
                self._model.config.hidden_size,
                dtype=self._model.dtype,
                device=self._boundary.device,
            )
            return [nothing] * self._mtp_modules.num_modules
        fill = self._pending.take(slots[order])
        last_states = self._mtp_modules.fill(
            slots[order], fill.starts, fill.counts, self._boundary.up(fill.token_ids), fill.hidden
        )
        place = np.zeros_like(slots)
        place[order] = np.arange(len(order))
        drafting = self._boundary.up(place[: rows.num_drafting(0)])
        return [states[drafting] for states in last_states]

    def _verify(self, step: StepInput, rows: StepRows, drafts: Drafts) -> Tensor:
        """[T, hidden] states of the target over anchors, drafts and chunk rows, in one forward."""
        token_ids = np.empty(rows.num_rows, np.int64)
        anchor_rows = np.cumsum(rows.k + 1) - (rows.k + 1)
        token_ids[anchor_rows] = self._lengths.anchors(rows.slots[: rows.num_verifies])
        is_draft = np.ones(rows.num_verify_rows, bool)
        is_draft[anchor_rows] = False
        token_ids[: rows.num_verify_rows][is_draft] = drafts.on_host
        token_ids[rows.num_verify_rows :] = step.ids
        return self._model.forward(self._boundary.up(token_ids), self._slot_rows.target(rows), self._cache)

    def _sample(self, rows: StepRows, hidden: Tensor, drafts: Drafts) -> Verified:
        """The tokens of every verify row and of every final chunk."""
        target_rows, _, _ = rows.sampled_rows
        if len(target_rows) < len(hidden):
            hidden = hidden[self._boundary.up(target_rows)]
        return self._sampler.verify(self._model.logits(hidden), rows, drafts)

    def _fill_prompt(self, step: StepInput, rows: StepRows, hidden: Tensor) -> None:
        """Run the MTP modules over the chunks' own rows."""
        chunks = slice(rows.num_verifies, None)
        fill = PromptFill.of(rows, self._pending.is_carried(rows.slots[chunks], rows.starts[chunks]))
        if not fill.num_rows:
            return
        states = hidden[rows.num_verify_rows :]
        if len(fill.continued):
            states = torch.cat([states, self._pending.take_carried(fill.continued)])
        self._mtp_modules.fill(
            fill.slots,
            fill.starts,
            fill.counts,
            self._boundary.up(step.ids.astype(np.int64)[fill.ids]),
            states[self._boundary.up(fill.previous)],
            readonly=fill.readonly,
        )

    def _take_emitted(self, rows: StepRows, num_emitted: Int64s, tokens: Int64s, hidden: Tensor) -> None:
        """The step's tokens are accepted here and now: the coordinator will come to the same ones.

        Their states wait for the MTP layer, as does the last state of each middle chunk.
        """
        emitted = rows.emitted(num_emitted)
        # A request that drew nothing has failed; steps sent before that is known go on from any legal token.
        accepted, ends = np.maximum(tokens[emitted], 0).astype(np.int32), np.cumsum(num_emitted)
        yielding = np.flatnonzero(num_emitted)
        self._lengths.emit(rows.token_slots[yielding], accepted[ends[yielding] - 1])
        for slot, begin, end in zip(
            rows.token_slots.tolist(), (ends - num_emitted).tolist(), ends.tolist(), strict=True
        ):
            self._sampling.append(slot, accepted[begin:end])
        if not self._config.num_speculative_tokens:
            return
        target_rows, _, _ = rows.sampled_rows
        self._pending.store(
            rows.token_slots,
            rows.token_starts,
            num_emitted,
            accepted,
            hidden[self._boundary.up(target_rows[emitted])],
        )
        if rows.middle.any():
            last_rows = np.cumsum(rows.counts)[rows.middle] - 1
            following = (rows.starts + rows.counts)[rows.middle]
            self._pending.carry(rows.slots[rows.middle], following, hidden[self._boundary.up(last_rows)])
