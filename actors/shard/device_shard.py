"""A shard whose steps have fixed shapes: what a device can run without the host, and a graph can replay.

It executes the same messages as `Shard` and comes to the same tokens, drafts and lengths. Between the message
and the report nothing is read back, with two exceptions that a step announces: a request with rules
(`LogitRules`: the host counts its tokens) and log probabilities. State and layout: contracts/device_step.md.
Coupled acceptance only.

Shape legend: B places of a bucket, K the step's most drafts, F pending rows, n MTP modules.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.acceptance import length_of_walk
from actors.config import GroupConfig
from actors.messages import PENDING_CAPACITY, RowKind, StepInput, StepOutput
from actors.model.model import Model
from actors.shard.boundary import Boundary
from actors.shard.device_layout import HostView, StepLayout
from actors.shard.device_rows import DeviceRowMaker
from actors.shard.device_sampler import draw_rows, finite_or_none
from actors.shard.device_state import DeviceState
from actors.shard.locating import locating
from actors.shard.logprobs_message import logprobs_message
from actors.shard.mtp_modules import MtpModules
from actors.shard.prompt_fill import PromptFill
from actors.shard.prompt_logprobs import PromptLogprobs
from actors.shard.samplers import draws_by_rejection
from actors.shard.slot_rules import Preceding, SlotRules
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_cache import KVCache
from kernels_integration.logprobs import Logprobs, logprobs_of
from kernels_integration.spans import Span, Spans
from kernels_integration.token_marks import MASKED

Int64s = NDArray[np.int64]


class DeviceShard:
    """The state of one rank, on its device. Errors: as `Shard`, but for tables, which the host cannot see."""

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
        assert not draws_by_rejection(config), "standard rejection sampling has no fixed shapes yet"
        self._drafts = config.num_speculative_tokens > 0
        self._model = model
        self._cache = cache
        self._tp = tp
        self._spans = spans
        self._max_num_seqs = config.max_num_seqs
        self._boundary = boundary = Boundary(model.backend.device)
        capacity = PENDING_CAPACITY if self._drafts else 1
        self._host = HostView(config.max_num_seqs, capacity=capacity)
        self._state = DeviceState(
            num_slots=config.max_num_seqs,
            max_blocks=-(-config.max_model_len // (config.block_size * dcp.size)),
            capacity=capacity,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            boundary=boundary,
        )
        self._rows = DeviceRowMaker(self._state, dcp, block_size=config.block_size, boundary=boundary)
        self._modules = MtpModules(
            model, cache, self._rows, num_slots=config.max_num_seqs + 1, boundary=boundary
        )
        slice_size = -(-model.config.vocab_size // tp.size)
        self._rules = SlotRules(vocab_start=model.vocab_start, slice_size=slice_size, boundary=boundary)
        self._prompt_logprobs = PromptLogprobs(
            vocab_start=model.vocab_start, slice_size=slice_size, boundary=boundary
        )

    @torch.inference_mode()
    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        """Run one step. On rank 0 `report` is called as soon as its tokens are known."""
        with locating(step.step, self._tp.rank):
            self._execute(step, report)

    def _execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        self._apply(step)
        layout = self._host.layout(step, self._num_places(step))
        slots, k = self._boundary.up(layout.slots), self._boundary.up(layout.k)
        with self._spans("draft"):
            drafts = self._draft(layout, slots, k)
        with self._spans("verify"):
            starts = self._state.length.index_select(0, slots)
            hidden, is_real = self._verify(step, layout, slots, k, drafts)
        with self._spans("sampling"):
            drawn, logprobs = self._sample(layout, slots, starts, drafts, hidden, is_real)
            chunk_hidden = hidden[layout.num_verify_rows :]
            prompt_logprobs = self._prompt_logprobs.of_step(
                layout.chunks, chunk_hidden, self._model.logits, self._tp
            )
        tokens = drawn[: layout.num_verify_rows].view(layout.num_places, layout.k_max + 1)
        num_emitted = length_of_walk(drafts, tokens)
        self._state.length.index_copy_(0, slots, starts + num_emitted)
        if self._tp.rank == 0:
            report(self._output(step, layout, drafts, drawn, starts + num_emitted, logprobs, prompt_logprobs))
        states = (
            hidden[: layout.num_verify_rows].view(*tokens.shape, hidden.shape[1]) if self._drafts else None
        )
        self._state.emit(slots, starts + 1, num_emitted, tokens, states)
        if layout.has_rules:
            self._count_tokens(layout, tokens, num_emitted, drawn)
        if len(layout.chunks.slots):
            self._take_chunks(step, layout, chunk_hidden, drawn[layout.num_verify_rows :])

    def take_spans(self) -> list[Span]:
        """Where the time went since the last call; empty unless the group is traced."""
        return self._spans.take()

    def _num_places(self, step: StepInput) -> int:
        """The smallest bucket that holds the verifies: powers of two, and all slots."""
        num_verifies = int((step.kind == RowKind.VERIFY).sum())
        return min(1 << max(num_verifies - 1, 0).bit_length(), self._max_num_seqs) if num_verifies else 0

    def _apply(self, step: StepInput) -> None:
        """Admissions and new blocks: small scatters."""
        self._state.admit(step.admit)
        for admission in step.admit:
            self._host.admit(admission)
            self._rules.admit(admission)
            self._prompt_logprobs.admit(admission)
        self._state.add_blocks(*self._host.add_blocks(step))

    def _draft(self, layout: StepLayout, slots: Tensor, k: Tensor) -> Tensor:
        """[B, K] int64; what a request does not draft is 0."""
        num_places, k_max, device = layout.num_places, layout.k_max, slots.device
        drafts = torch.zeros(num_places, k_max, dtype=torch.int64, device=device)
        if not layout.num_fill_rows:
            return drafts
        anchor_states = self._fill(layout, slots)
        states, num_modules = anchor_states[0].unsqueeze(1), len(anchor_states)
        anchors = self._state.length.index_select(0, slots)
        for i in range(k_max):
            with self._spans("sampling"):
                preceding = _preceding(drafts[:, :i])
                drafts[:, i] = self._draw(
                    layout, layout.slots, slots, anchors + i + 1, self._model.logits(states[:, -1]), preceding
                ).clamp(min=0)  # a draft that cannot be drawn may be any token
            if i + 1 == k_max:
                break
            num_rows, module = min(i + 1, num_modules), (i + 1) % num_modules
            offsets = torch.arange(i + 2 - num_rows, i + 2, device=device)
            states = self._mtp(
                layout,
                module,
                slots,
                anchors.unsqueeze(1) + offsets,
                (k > i + 1).unsqueeze(1).expand(-1, num_rows),
                drafts[:, i + 1 - num_rows : i + 1],
                states,
            )
            if i + 1 < num_modules:  # the next module has yet to see the first draft
                states = torch.cat((anchor_states[i + 1].unsqueeze(1), states), dim=1)
        return drafts

    def _fill(self, layout: StepLayout, slots: Tensor) -> list[Tensor]:
        """Run the modules over the pending rows; per module the states [B, hidden] of the anchors."""
        fills = self._boundary.up(layout.fill)
        positions, token_ids, previous = self._state.pending(slots, layout.num_fill_rows)
        counts = torch.where(fills, self._state.pending_count.index_select(0, slots), 0)
        self._state.take_pending(slots, fills)
        is_real = torch.arange(layout.num_fill_rows, device=slots.device) < counts.unsqueeze(1)
        place, last = torch.arange(len(slots), device=slots.device), (counts - 1).clamp(min=0)
        last_states: list[Tensor] = []
        for module in range(self._modules.num_modules):
            states = self._mtp(layout, module, slots, positions, is_real, token_ids, previous)
            last_states.append(states[place, last])
            if module + 1 < self._modules.num_modules:
                kept = self._modules.last[module]
                before = kept.index_select(0, slots)
                previous = torch.cat((before.unsqueeze(1), states[:, :-1]), dim=1)
                kept.index_copy_(0, slots, torch.where((counts > 0).unsqueeze(1), last_states[-1], before))
        return last_states

    def _mtp(
        self,
        layout: StepLayout,
        module: int,
        slots: Tensor,
        positions: Tensor,
        is_real: Tensor,
        token_ids: Tensor,
        previous: Tensor,
    ) -> Tensor:
        """States [B, r, hidden] of a module's rows at positions [B, r]."""
        rows = self._rows.make(
            slots,
            _request_of(positions),
            positions.flatten(),
            is_real.flatten(),
            max_visible=layout.max_visible,
            visible_from=self._state.mtp_from.index_select(0, slots) + module,
        )
        states = self._model.mtp_forward(
            token_ids.flatten(), previous.flatten(0, 1), rows, self._cache, module=module
        )
        return states.view(*positions.shape, states.shape[1])

    def _verify(
        self, step: StepInput, layout: StepLayout, slots: Tensor, k: Tensor, drafts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """([T, hidden] states of the target, [B, K + 1] which verify rows are real), in one forward."""
        up, chunks, device = self._boundary.up, layout.chunks, slots.device
        column = torch.arange(layout.k_max + 1, device=device)
        positions = self._state.length.index_select(0, slots).unsqueeze(1) + column
        token_ids = torch.cat(
            (self._state.anchor.index_select(0, slots).unsqueeze(1), drafts), dim=1
        ).flatten()
        is_real = (column <= k.unsqueeze(1)).flatten()
        request, writes, max_visible = _request_of(positions), None, layout.max_visible
        flat = positions.flatten()
        if len(chunks.slots):
            chunk = np.repeat(np.arange(len(chunks.slots)), chunks.counts)
            offsets = np.arange(len(chunk)) - (np.cumsum(chunks.counts) - chunks.counts)[chunk]
            slots = torch.cat((slots, up(chunks.slots)))
            request = torch.cat((request, up(chunk + layout.num_places)))
            flat = torch.cat((flat, up(chunks.starts[chunk] + offsets)))
            token_ids = torch.cat((token_ids, up(step.ids.astype(np.int64))))
            writes = torch.cat((torch.ones_like(is_real), up(offsets >= chunks.readonly[chunk])))
            is_real = torch.cat((is_real, torch.ones(len(chunk), dtype=torch.bool, device=device)))
            max_visible = max(max_visible, int((chunks.starts + chunks.counts).max()))
        rows = self._rows.make(slots, request, flat, is_real, max_visible=max_visible, writes=writes)
        hidden = self._model.forward(token_ids, rows, self._cache)
        return hidden, (rows.visible_to[: layout.num_verify_rows] > 0).view(positions.shape)

    def _sample(
        self,
        layout: StepLayout,
        slots: Tensor,
        starts: Tensor,
        drafts: Tensor,
        hidden: Tensor,
        is_real: Tensor,
    ) -> tuple[Tensor, Logprobs | None]:
        """Tokens of the B * (K + 1) verify rows, then of the final chunks; MASKED where masked."""
        up, chunks, width = self._boundary.up, layout.chunks, layout.k_max + 1
        ends = np.cumsum(chunks.counts)[chunks.final] - 1 + layout.num_verify_rows
        final_slots = chunks.slots[chunks.final]
        final_ends = (chunks.starts + chunks.counts)[chunks.final]
        column = torch.arange(width, device=slots.device)
        positions = torch.cat(((starts.unsqueeze(1) + 1 + column).flatten(), up(final_ends)))
        row_slots = torch.cat((slots.repeat_interleave(width), up(final_slots)))
        if not len(row_slots):
            return row_slots, None
        if layout.num_verify_rows + len(ends) < len(hidden):
            hidden = torch.cat((hidden[: layout.num_verify_rows], hidden.index_select(0, up(ends))))
        logits = self._model.logits(hidden)
        on_host = np.concatenate([np.repeat(layout.slots, width), final_slots])
        drawn = self._draw(
            layout, on_host, row_slots, positions, logits, _verify_preceding(drafts, len(final_slots))
        )
        is_drawn = torch.cat((is_real.flatten(), up(final_ends < chunks.limits[chunks.final])))
        return drawn.masked_fill(~is_drawn, MASKED), self._logprobs_of(layout, logits, drawn)

    def _draw(
        self,
        layout: StepLayout,
        on_host: Int64s,
        slots: Tensor,
        positions: Tensor,
        logits: Tensor,
        preceding: Preceding,
    ) -> Tensor:
        """[R] tokens at positions [R] for slots [R], which the host has too."""
        rules = None
        if layout.has_rules:
            rules = self._rules.gather(on_host, self._boundary.down(positions), preceding)
        rows = self._state.sampling_rows(slots, positions, rules)
        return draw_rows(logits, self._model.vocab_start, rows, self._tp, has_filters=layout.has_filters)

    def _logprobs_of(self, layout: StepLayout, logits: Tensor, drawn: Tensor) -> Logprobs | None:
        if layout.num_logprobs < 0:
            return None
        asked = self._boundary.up(layout.logprob_rows)
        return logprobs_of(
            finite_or_none(logits.index_select(0, asked)),
            self._model.vocab_start,
            drawn.index_select(0, asked),
            layout.num_logprobs,
            self._tp,
        )

    def _output(
        self,
        step: StepInput,
        layout: StepLayout,
        drafts: Tensor,
        drawn: Tensor,
        lengths: Tensor,
        logprobs: Logprobs | None,
        prompt_logprobs: Logprobs | None,
    ) -> StepOutput:
        """The report: here the host waits for the device."""
        down, chunks, width = self._boundary.down, layout.chunks, layout.k_max + 1
        k = layout.k[: layout.num_verifies]
        tokens = down(drawn)
        own = np.concatenate(
            [layout.taken(width, k + 1), layout.num_verify_rows + np.arange(int(chunks.final.sum()))]
        )
        length = np.concatenate([down(lengths)[: layout.num_verifies], chunks.starts + chunks.counts])
        return StepOutput(
            epoch=step.epoch,
            step=step.step,
            drafts=down(drafts).reshape(-1)[layout.taken(layout.k_max, k)].astype(np.int32),
            tokens=tokens[own].astype(np.int32),
            length=length.astype(np.int32),
            logprobs=logprobs_message(logprobs, self._boundary),
            prompt_logprobs=logprobs_message(prompt_logprobs, self._boundary),
        )

    def _count_tokens(self, layout: StepLayout, tokens: Tensor, num_emitted: Tensor, drawn: Tensor) -> None:
        """Rules count what was accepted, on the host."""
        accepted, counts = self._boundary.down(tokens), self._boundary.down(num_emitted)
        for place, slot in enumerate(layout.slots[: layout.num_verifies].tolist()):
            self._rules.append(slot, np.maximum(accepted[place, : counts[place]], 0).astype(np.int32))
        finals = self._boundary.down(drawn[layout.num_verify_rows :])
        for slot, token in zip(layout.chunks.slots[layout.chunks.final].tolist(), finals, strict=True):
            if token != MASKED:
                self._rules.append(slot, np.array([max(token, 0)], np.int32))

    def _take_chunks(self, step: StepInput, layout: StepLayout, hidden: Tensor, drawn: Tensor) -> None:
        """Prompt fill, and what chunks leave: a length, a final one's pending row, a middle one's state.

        hidden [T, hidden]: of the chunk rows; drawn: of the final chunks.
        """
        up, chunks = self._boundary.up, layout.chunks
        ends, following = np.cumsum(chunks.counts) - 1, chunks.starts + chunks.counts
        self._state.length.index_copy_(0, up(chunks.slots), up(following))
        if self._drafts:
            with self._spans("prompt_fill"):
                self._fill_prompt(step, chunks_of=layout, hidden=hidden)
        if chunks.final.any():
            states = hidden.index_select(0, up(ends[chunks.final])).unsqueeze(1) if self._drafts else None
            self._state.emit(
                up(chunks.slots[chunks.final]),
                up(following[chunks.final]),
                (drawn != MASKED).long(),
                drawn.unsqueeze(1),
                states,
            )
        if self._drafts and chunks.middle.any():
            states = hidden.index_select(0, up(ends[chunks.middle]))
            self._state.carried.index_copy_(0, up(chunks.slots[chunks.middle]), states)
            self._host.carry(chunks)

    def _fill_prompt(self, step: StepInput, *, chunks_of: StepLayout, hidden: Tensor) -> None:
        """Run the MTP modules over the chunks' own rows."""
        up = self._boundary.up
        fill = PromptFill.of(chunks_of.chunks, self._host.is_carried(chunks_of.chunks))
        if not fill.num_rows:
            return
        if len(fill.continued):
            hidden = torch.cat([hidden, self._state.carried.index_select(0, up(fill.continued))])
        self._modules.fill(
            fill.slots,
            fill.starts,
            fill.counts,
            up(step.ids.astype(np.int64)[fill.ids]),
            hidden.index_select(0, up(fill.previous)),
            readonly=fill.readonly,
        )


def _request_of(positions: Tensor) -> Tensor:
    """[B * r]: the place that each row of positions [B, r] belongs to."""
    return torch.arange(positions.shape[0], device=positions.device).repeat_interleave(positions.shape[1])


def _preceding(drafts: Tensor) -> Preceding:
    """drafts [B, i]: all of them stand before the one row of each request."""
    num_places, num_before = drafts.shape
    return Preceding(
        tokens=drafts.flatten(),
        first=np.arange(num_places) * num_before,
        count=np.full(num_places, num_before),
    )


def _verify_preceding(drafts: Tensor, num_finals: int) -> Preceding:
    """drafts [B, K]: i of them stand before row i of a verify, none before others."""
    num_places, k_max = drafts.shape
    none = np.zeros(num_finals, np.int64)
    return Preceding(
        tokens=drafts.flatten(),
        first=np.concatenate([np.repeat(np.arange(num_places) * k_max, k_max + 1), none]),
        count=np.concatenate([np.tile(np.arange(k_max + 1), num_places), none]),
    )
