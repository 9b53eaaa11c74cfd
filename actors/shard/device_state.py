"""What a shard knows of every state slot, on the device: allocated once, at fixed addresses.

The host knows which slots a step's rows belong to, how many rows they are, new blocks and admissions; how
long a request is, its anchor and its pending rows only the device knows (contracts/device_step.md 2). An
admission writes everything of its slot, so nothing of the slot's former owner is left.

Shape legend: S slots, B requests of a step (`slots` names theirs; `nobody` stands for a request that is not
there), F pending rows, K drafts.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.messages import Admission
from actors.shard.boundary import Boundary
from kernels_integration.logit_rules import LogitRules
from kernels_integration.sampling import SamplingRows

Int64s = NDArray[np.int64]


class DeviceState:
    """Owner of the slots' tensors. Row `nobody` = S belongs to no request: nobody reads what it holds."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_blocks: int,
        capacity: int,
        hidden_size: int,
        dtype: torch.dtype,
        boundary: Boundary,
    ) -> None:
        self._boundary = boundary
        self.nobody = num_slots
        self.capacity = capacity
        self.length = self._numbers()
        """Tokens whose KV is held: the position of the anchor."""
        self.anchor = self._numbers()
        self.limit = self._numbers()
        """Rows at positions > limit - 2 are masked; 0 for nobody."""
        self.mtp_from = self._numbers()
        self.pending_start = self._numbers()
        self.pending_count = self._numbers()
        self.fell_out = self._numbers()
        """1: rows older than those pending fell out since the last fill."""
        device, rows = boundary.device, num_slots + 1
        self.block_table = torch.full((rows, max_blocks), -1, dtype=torch.int64, device=device)
        self._pending_tokens = torch.zeros(rows * capacity, dtype=torch.int64, device=device)
        self._pending_hidden = torch.zeros(rows * capacity, hidden_size, dtype=dtype, device=device)
        """The row for position p of a slot stands at slot * capacity + p % capacity."""
        self.carried = torch.zeros(rows, hidden_size, dtype=dtype, device=device)
        """The last state of each slot's last middle chunk."""
        self._floats = torch.zeros(3, rows, dtype=torch.float64, device=device)
        """temperature, top_p, min_p"""
        self._ints = torch.zeros(2, rows, dtype=torch.int64, device=device)
        """top_k, seed"""

    def _numbers(self) -> Tensor:
        return torch.zeros(self.nobody + 1, dtype=torch.int64, device=self._boundary.device)

    def admit(self, admissions: tuple[Admission, ...]) -> None:
        """Replace everything of their slots."""
        if not admissions:
            return
        up = self._boundary.up
        slots = up(np.array([a.slot for a in admissions], np.int64))
        for zeroed in (self.length, self.pending_start, self.pending_count, self.fell_out):
            zeroed.index_fill_(0, slots, 0)
        self.anchor.index_fill_(0, slots, 0)
        self.mtp_from.index_fill_(0, slots, 1)
        self.limit.index_copy_(0, slots, up(np.array([a.limit for a in admissions], np.int64)))
        self.block_table.index_fill_(0, slots, -1)
        specs = [a.sampling for a in admissions]
        floats = np.array([[getattr(s, f) for s in specs] for f in ("temperature", "top_p", "min_p")])
        seeds = np.array([a.seed for a in admissions], np.uint64).astype(np.int64)
        top_k = np.array([max(s.top_k, 0) for s in specs], np.int64)
        self._floats.index_copy_(1, slots, up(floats))
        self._ints.index_copy_(1, slots, up(np.stack((top_k, seeds))))

    def add_blocks(self, slots: Int64s, entries: Int64s, blocks: Int64s) -> None:
        """Entry entries[i] of slot slots[i]'s table becomes blocks[i]."""
        if not len(slots):
            return
        up = self._boundary.up
        flat = up(slots * self.block_table.shape[1] + entries)
        self.block_table.view(-1).index_copy_(0, flat, up(blocks))

    def sampling_rows(self, slots: Tensor, position: Tensor, rules: LogitRules | None) -> SamplingRows:
        """Of rows [R] that draw the tokens at `position` [R] for `slots` [R]."""
        temperature, top_p, min_p = self._floats.index_select(1, slots).unbind(0)
        top_k, seed = self._ints.index_select(1, slots).unbind(0)
        return SamplingRows(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=position,
            rules=rules,
        )

    def pending(self, slots: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """(positions [B, F], token_ids [B, F], hidden [B, F, hidden]) of the first num_rows = F pending rows.

        Those from pending_count on hold anything.
        """
        positions = self.pending_start[slots].unsqueeze(1) + torch.arange(num_rows, device=slots.device)
        places = self._places(slots, positions)
        hidden = self._pending_hidden.index_select(0, places.flatten())
        return positions, self._pending_tokens[places], hidden.view(*positions.shape, -1)

    def take_pending(self, slots: Tensor, taken: Tensor) -> None:
        """The pending rows of slots [B] where `taken` [B] are filled: none is left."""
        filled = taken & (self.pending_count[slots] > 0)
        has_hole = filled & (self.fell_out[slots] > 0)
        start = self.pending_start[slots]
        self.mtp_from.index_copy_(0, slots, torch.where(has_hole, start, self.mtp_from[slots]))
        self.fell_out.index_copy_(0, slots, torch.where(filled, 0, self.fell_out[slots]))
        self.pending_count.index_copy_(0, slots, torch.where(filled, 0, self.pending_count[slots]))

    def emit(
        self, slots: Tensor, starts: Tensor, num_emitted: Tensor, tokens: Tensor, hidden: Tensor | None
    ) -> None:
        """The first num_emitted[b] of tokens [B, K + 1], at positions starts[b].., are accepted.

        The last of them is the anchor. They wait with hidden [B, K + 1, hidden], the states before them, or,
        where that is None, do not.
        """
        tokens = tokens.clamp(min=0)  # after a row that drew nothing: any legal token
        last = tokens.gather(1, (num_emitted - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        self.anchor.index_copy_(0, slots, torch.where(num_emitted > 0, last, self.anchor[slots]))
        if hidden is None:
            return
        column = torch.arange(tokens.shape[1], device=tokens.device)
        is_kept = column < num_emitted.unsqueeze(1)
        owners = torch.where(is_kept, slots.unsqueeze(1), self.nobody)
        places = self._places_of(owners, starts.unsqueeze(1) + column).flatten()
        self._pending_tokens.index_copy_(0, places, tokens.flatten())
        self._pending_hidden.index_copy_(0, places, hidden.flatten(0, 1))
        count = self.pending_count[slots]
        start = torch.where(count == 0, starts, self.pending_start[slots])
        excess = (count + num_emitted - self.capacity).clamp(min=0)
        self.pending_start.index_copy_(0, slots, start + excess)
        self.pending_count.index_copy_(0, slots, count + num_emitted - excess)
        self.fell_out.index_copy_(0, slots, torch.where(excess > 0, 1, self.fell_out[slots]))

    def _places(self, slots: Tensor, positions: Tensor) -> Tensor:
        return self._places_of(slots.unsqueeze(1), positions)

    def _places_of(self, slots: Tensor, positions: Tensor) -> Tensor:
        return slots * self.capacity + positions % self.capacity
