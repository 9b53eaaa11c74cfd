"""Which rows the MTP modules are run over after a step with chunks: the chunks' own (contracts/mtp.md 2)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.shard.step_rows import StepRows

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFill:
    """T rows of b chunks, packed: slot p from h[p-1] and t[p]; slot 0 stays empty.

    The first row after a prefix hit gives only its h: nobody has the state before it. The rows of the hit
    that follow are run, in whichever chunks they come, for the states that later modules need.
    """

    slots: Int64s
    """[b]"""
    starts: Int64s
    """[b]"""
    counts: Int64s
    """[b] at least 1."""
    readonly: Int64s
    """[b] leading rows that do not write."""
    ids: Int64s
    """[T] indices into the step's ids: t[p]."""
    previous: Int64s
    """[T] h[p-1]: row of the chunks' states, or, beyond those, of the states carried to `continued`."""
    continued: Int64s
    """[c] slots whose chunk goes on from a state that their last chunk carried on."""

    @classmethod
    def of(cls, rows: StepRows, is_carried: NDArray[np.bool_]) -> "PromptFill":
        """is_carried: of each of the step's chunks, whether the state before it was carried there."""
        chunks = slice(rows.num_verifies, None)
        slots, starts, counts = rows.slots[chunks], rows.starts[chunks], rows.counts[chunks]
        firsts = np.where(is_carried, starts, starts + 1)
        fills = starts + counts - firsts
        first_rows = np.cumsum(counts) - counts
        request = np.repeat(np.arange(len(slots)), fills)
        offsets = (firsts - starts)[request] + np.arange(len(request)) - (np.cumsum(fills) - fills)[request]
        ids = first_rows[request] + offsets
        carried_row = np.cumsum(is_carried) - 1 + int(counts.sum())
        filled = fills > 0
        return cls(
            slots=slots[filled],
            starts=firsts[filled],
            counts=fills[filled],
            readonly=np.maximum(rows.readonly[chunks] - (firsts - starts), 0)[filled],
            ids=ids,
            previous=np.where(offsets == 0, carried_row[request], ids - 1),
            continued=slots[is_carried],
        )

    @property
    def num_rows(self) -> int:
        return len(self.ids)
