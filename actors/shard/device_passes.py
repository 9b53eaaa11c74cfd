"""The passes of a step in fixed shapes: draft, verify, draw, accept. Nothing here meets the host.

Given a `DecodeShape` and slots, k and fills on the device, all shapes and addresses follow: what runs between
them is what a graph replays. Chunk rows and rules, where a step has them, come from outside, and such a step
runs eagerly.

Shape legend: B places, K drafts, F pending rows, n MTP modules, R drawn rows, T rows of the forward.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.acceptance import length_of_walk
from actors.model.model import Model
from actors.shard.chunk_rows import ChunkRows
from actors.shard.device_layout import DecodeShape
from actors.shard.device_rows import DeviceRowMaker
from actors.shard.device_sampler import draw_rows
from actors.shard.device_state import DeviceState
from actors.shard.mtp_modules import MtpModules
from actors.shard.step_rules import StepRules
from kernels_integration.collectives import Collectives
from kernels_integration.kv_cache import KVCache
from kernels_integration.logit_rules import LogitRules
from kernels_integration.spans import Spans
from kernels_integration.token_marks import MASKED


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What a step came to, on the device."""

    report: Tensor
    """[B * K + R + B] int64, all that the host asks for in one copy: drafts [B, K], `drawn`, lengths [B].

    The lengths are those after the step; drafts that a request does not have hold anything.
    """
    drawn: Tensor
    """[R] tokens of the B * (K + 1) verify rows, then of final chunks; MASKED where masked."""
    num_emitted: Tensor
    """[B]"""
    hidden: Tensor
    """[T, hidden] of the verify rows, then of the chunk rows."""
    logits: Tensor
    """[R, V]"""
    unmasked: Tensor
    """[R] as drawn, before rows were masked."""


class DevicePasses:
    """Runs the model over the slots' state and moves it on."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        state: DeviceState,
        rows: DeviceRowMaker,
        modules: MtpModules,
        *,
        tp: Collectives,
        spans: Spans,
    ) -> None:
        self._model = model
        self._cache = cache
        self._state = state
        self._rows = rows
        self._modules = modules
        self._tp = tp
        self._spans = spans

    def run(
        self,
        shape: DecodeShape,
        places: Tensor,
        chunks: ChunkRows | None = None,
        rules: StepRules | None = None,
    ) -> Passed:
        """places [3, B] int64: `StepLayout.places`. Moves on the state of the verifies, not of the chunks."""
        slots, k, fills = places[0], places[1], places[2] != 0
        with self._spans("draft"):
            drafts = self._draft(shape, slots, k, fills, rules)
        starts = self._state.length.index_select(0, slots)
        with self._spans("verify"):
            hidden, is_real = self._verify(shape, slots, k, starts, drafts, chunks)
        with self._spans("sampling"):
            logits, unmasked = self._sample(shape, slots, starts, drafts, hidden, chunks, rules)
        num_rows = shape.num_verify_rows
        is_drawn = is_real if chunks is None else torch.cat((is_real, chunks.final_is_drawn))
        drawn = unmasked.masked_fill(~is_drawn, MASKED)
        tokens = drawn[:num_rows].view(shape.num_places, shape.k_max + 1)
        num_emitted = length_of_walk(drafts, tokens)
        self._state.length.index_copy_(0, slots, starts + num_emitted)
        states = hidden[:num_rows].view(*tokens.shape, hidden.shape[1]) if self._modules.num_modules else None
        self._state.emit(slots, starts + 1, num_emitted, tokens, states)
        return Passed(
            report=torch.cat((drafts.flatten(), drawn, starts + num_emitted)),
            drawn=drawn,
            num_emitted=num_emitted,
            hidden=hidden,
            logits=logits,
            unmasked=unmasked,
        )

    def _draft(
        self, shape: DecodeShape, slots: Tensor, k: Tensor, fills: Tensor, rules: StepRules | None
    ) -> Tensor:
        """[B, K] int64."""
        device = slots.device
        drafts = torch.zeros(shape.num_places, shape.k_max, dtype=torch.int64, device=device)
        if not shape.num_fill_rows:
            return drafts
        anchor_states = self._fill(shape, slots, fills)
        states, num_modules = anchor_states[0].unsqueeze(1), len(anchor_states)
        anchors = self._state.length.index_select(0, slots)
        for i in range(shape.k_max):
            with self._spans("sampling"):
                positions = anchors + i + 1
                of_rows = None if rules is None else rules.of_drafts(positions, drafts[:, :i])
                drawn = self._draw(shape, slots, positions, self._model.logits(states[:, -1]), of_rows)
            drafts[:, i] = drawn.clamp(min=0)  # a draft that cannot be drawn may be any token
            if i + 1 == shape.k_max:
                break
            num_rows, module = min(i + 1, num_modules), (i + 1) % num_modules
            positions = anchors.unsqueeze(1) + torch.arange(i + 2 - num_rows, i + 2, device=device)
            is_real = (k > i + 1).unsqueeze(1).expand(-1, num_rows)
            drafted = drafts[:, i + 1 - num_rows : i + 1]
            states = self._mtp(shape, module, slots, positions, is_real, drafted, states)
            if i + 1 < num_modules:  # the next module has yet to see the first draft
                states = torch.cat((anchor_states[i + 1].unsqueeze(1), states), dim=1)
        return drafts

    def _fill(self, shape: DecodeShape, slots: Tensor, fills: Tensor) -> list[Tensor]:
        """Run the modules over the pending rows; per module the states [B, hidden] of the anchors."""
        positions, token_ids, previous = self._state.pending(slots, shape.num_fill_rows)
        counts = torch.where(fills, self._state.pending_count.index_select(0, slots), 0)
        self._state.take_pending(slots, fills)
        is_real = torch.arange(shape.num_fill_rows, device=slots.device) < counts.unsqueeze(1)
        place, last = torch.arange(len(slots), device=slots.device), (counts - 1).clamp(min=0)
        last_states: list[Tensor] = []
        for module in range(self._modules.num_modules):
            states = self._mtp(shape, module, slots, positions, is_real, token_ids, previous)
            last_states.append(states[place, last])
            if module + 1 < self._modules.num_modules:
                kept = self._modules.last[module]
                before = kept.index_select(0, slots)
                previous = torch.cat((before.unsqueeze(1), states[:, :-1]), dim=1)
                kept.index_copy_(0, slots, torch.where((counts > 0).unsqueeze(1), last_states[-1], before))
        return last_states

    def _mtp(
        self,
        shape: DecodeShape,
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
            _place_of(positions),
            positions.flatten(),
            is_real.flatten(),
            max_visible=shape.max_visible,
            visible_from=self._state.mtp_from.index_select(0, slots) + module,
            rows_per_request=positions.shape[1],
        )
        states = self._model.mtp_forward(
            token_ids.flatten(), previous.flatten(0, 1), rows, self._cache, module=module
        )
        return states.view(*positions.shape, states.shape[1])

    def _verify(
        self,
        shape: DecodeShape,
        slots: Tensor,
        k: Tensor,
        starts: Tensor,
        drafts: Tensor,
        chunks: ChunkRows | None,
    ) -> tuple[Tensor, Tensor]:
        """([T, hidden] states of the target, [B * (K + 1)] which verify rows are real), in one forward."""
        column = torch.arange(shape.k_max + 1, device=slots.device)
        grid = starts.unsqueeze(1) + column
        anchors = self._state.anchor.index_select(0, slots)
        token_ids = torch.cat((anchors.unsqueeze(1), drafts), dim=1).flatten()
        is_real, request, positions = (column <= k.unsqueeze(1)).flatten(), _place_of(grid), grid.flatten()
        writes, max_visible, rows_per_request = None, shape.max_visible, shape.k_max + 1
        if chunks is not None:
            writes = torch.cat((torch.ones_like(is_real), chunks.writes))
            is_real = torch.cat((is_real, torch.ones_like(chunks.writes)))
            request = torch.cat((request, chunks.request + len(slots)))
            slots = torch.cat((slots, chunks.slots))
            positions = torch.cat((positions, chunks.positions))
            token_ids = torch.cat((token_ids, chunks.token_ids))
            max_visible, rows_per_request = max(max_visible, chunks.max_visible), 1
        rows = self._rows.make(
            slots,
            request,
            positions,
            is_real,
            max_visible=max_visible,
            writes=writes,
            rows_per_request=rows_per_request,
        )
        hidden = self._model.forward(token_ids, rows, self._cache)
        return hidden, rows.visible_to[: shape.num_verify_rows] > 0

    def _sample(
        self,
        shape: DecodeShape,
        slots: Tensor,
        starts: Tensor,
        drafts: Tensor,
        hidden: Tensor,
        chunks: ChunkRows | None,
        rules: StepRules | None,
    ) -> tuple[Tensor, Tensor]:
        """([R, V] logits, [R] tokens) of all verify rows, then of the final chunks."""
        width = shape.k_max + 1
        positions = (starts.unsqueeze(1) + 1 + torch.arange(width, device=slots.device)).flatten()
        row_slots = slots.repeat_interleave(width)
        if chunks is not None:
            positions = torch.cat((positions, chunks.final_positions))
            row_slots = torch.cat((row_slots, chunks.final_slots))
            finals = hidden.index_select(0, chunks.final_rows + shape.num_verify_rows)
            hidden = torch.cat((hidden[: shape.num_verify_rows], finals))
        logits = self._model.logits(hidden)
        if not len(row_slots):  # middle chunks alone draw nothing
            return logits, row_slots
        of_rows = None if rules is None else rules.of_verify(positions, drafts)
        return logits, self._draw(shape, row_slots, positions, logits, of_rows)

    def _draw(
        self, shape: DecodeShape, slots: Tensor, positions: Tensor, logits: Tensor, rules: LogitRules | None
    ) -> Tensor:
        """[R] tokens at positions [R] for slots [R]."""
        rows = self._state.sampling_rows(slots, positions, rules)
        model = self._model
        return draw_rows(
            logits, model.vocab_start, rows, self._tp, model.backend, has_filters=shape.has_filters
        )


def _place_of(positions: Tensor) -> Tensor:
    """[B * r]: the place that each row of positions [B, r] belongs to."""
    return torch.arange(positions.shape[0], device=positions.device).repeat_interleave(positions.shape[1])
