"""Hidden states that wait for the MTP layer, per state slot.

The MTP row in slot p needs the target's h[p-1] and the token t[p]. Both of every accepted token are
*pending* until a step fills them. At most `capacity` rows (R) wait; older ones fall out, and the MTP
layer then sees nothing before the first row that is left.
Source: contracts/mtp.md, "pending hidden states" and "k = 0".
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.shard.boundary import Boundary

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

_NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FillRows:
    """Pending rows of some requests, packed by request; ready to run through the MTP layer."""

    starts: Int64s
    """[b] position of each request's first row."""
    counts: Int64s
    """[b]"""
    token_ids: Int64s
    """[T] t[p]."""
    hidden: Tensor
    """[T, hidden]: h[p-1]."""


class PendingRows:
    """Owner of the waiting hidden states of every state slot. The states lie on the device."""

    def __init__(
        self,
        *,
        num_slots: int,
        capacity: int,
        hidden_size: int,
        dtype: torch.dtype,
        boundary: Boundary,
    ) -> None:
        self._boundary = boundary
        self._capacity = capacity
        self._hidden = torch.zeros(num_slots * capacity, hidden_size, dtype=dtype, device=boundary.device)
        self._tokens = np.zeros((num_slots, capacity), np.int64)
        self._start = np.zeros(num_slots, np.int64)
        self._count = np.zeros(num_slots, np.int64)
        self._fell_out = np.zeros(num_slots, bool)
        self._mtp_from = np.ones(num_slots, np.int64)
        self._carried_to = np.full(num_slots, _NOWHERE)

    def reset(self, slot: int) -> None:
        """Forget everything of a slot (admission)."""
        self._count[slot] = 0
        self._fell_out[slot] = False
        self._mtp_from[slot] = 1
        self._carried_to[slot] = _NOWHERE

    def mtp_from(self, slots: Int64s) -> Int64s:
        """[b] first position whose MTP entry a request's rows may see (1 unless rows fell out)."""
        return self._mtp_from[slots]

    def counts(self, slots: Int64s) -> Int64s:
        """[b] pending rows of each slot."""
        return self._count[slots]

    def store(self, slots: Int64s, starts: Int64s, counts: Int64s, token_ids: Int32s, hidden: Tensor) -> None:
        """Keep what a token step accepted: counts[b] rows of request b, packed in token_ids and hidden.

        starts[b]: MTP position of the first of them, one past the position of its hidden state.
        token_ids [T]: t[p]. hidden [T, hidden]: h[p-1].
        """
        for i in np.flatnonzero(self._count[slots] + counts > self._capacity).tolist():
            self._make_room(int(slots[i]), int(counts[i]))
        self._start[slots] = np.where(self._count[slots] == 0, starts, self._start[slots])
        rows = self._flat(slots, self._count[slots], counts)
        self._hidden.index_copy_(0, self._boundary.up(rows), hidden)
        self._tokens.reshape(-1)[rows] = token_ids
        self._count[slots] += counts

    def carry(self, slots: Int64s, positions: Int64s, hidden: Tensor) -> None:
        """Keep the last state of middle chunks, [b, hidden], for the rows at `positions` [b] that follow."""
        assert not self._count[slots].any(), "rows are pending before the prompt is complete"
        self._carried_to[slots] = positions
        self._hidden.index_copy_(0, self._boundary.up(slots * self._capacity), hidden)

    def is_carried(self, slots: Int64s, positions: Int64s) -> NDArray[np.bool_]:
        """[b] whether the state before the row at each position was carried by the slot's last chunk."""
        carried: NDArray[np.bool_] = self._carried_to[slots] == positions
        return carried

    def take_carried(self, slots: Int64s) -> Tensor:
        """[b, hidden]: the state that each request's last chunk carried on."""
        return self._hidden.index_select(0, self._boundary.up(slots * self._capacity))

    def take(self, slots: Int64s) -> FillRows:
        """Remove all pending rows of these slots, in order to fill them."""
        starts, counts = self._start[slots], self._count[slots]
        self._mtp_from[slots] = np.where(self._fell_out[slots], starts, self._mtp_from[slots])
        self._fell_out[slots] = False
        self._count[slots] = 0
        rows = self._flat(slots, np.zeros_like(counts), counts)
        return FillRows(
            starts=starts,
            counts=counts,
            token_ids=self._tokens.reshape(-1)[rows],
            hidden=self._hidden.index_select(0, self._boundary.up(rows)),
        )

    def _make_room(self, slot: int, count: int) -> None:
        """Drop the oldest pending rows so that `count` more fit."""
        waiting = int(self._count[slot])
        excess = waiting + count - self._capacity
        if excess <= 0:
            return
        base = slot * self._capacity
        kept = self._hidden[base + excess : base + waiting].clone()
        self._hidden[base : base + len(kept)] = kept
        self._tokens[slot, : len(kept)] = self._tokens[slot, excess:waiting].copy()
        self._start[slot] += excess
        self._count[slot] = len(kept)
        self._fell_out[slot] = True

    def _flat(self, slots: Int64s, offsets: Int64s, counts: Int64s) -> Int64s:
        """Indices into the flat buffer of rows offsets[b] .. offsets[b] + counts[b] - 1 of each slot."""
        ends = np.cumsum(counts)
        begin = np.repeat(slots * self._capacity + offsets - (ends - counts), counts)
        rows: Int64s = begin + np.arange(len(begin))
        return rows
