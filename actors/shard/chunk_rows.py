"""The chunk rows of a step, on the device; all about them is in the message."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from actors.messages import StepInput
from actors.shard.boundary import Boundary
from actors.shard.step_rows import StepRows


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """T rows of C chunks, packed, of which f are final."""

    slots: Tensor
    """[C]"""
    request: Tensor
    """[T] which of the chunks."""
    positions: Tensor
    """[T]"""
    token_ids: Tensor
    """[T]"""
    writes: Tensor
    """[T] bool: not of a prefix hit."""
    final_slots: Tensor
    """[f]"""
    final_rows: Tensor
    """[f] the last row of each final chunk, which draws a token."""
    final_positions: Tensor
    """[f] of the tokens drawn."""
    final_is_drawn: Tensor
    """[f] bool: False at a request's limit."""
    max_visible: int

    @classmethod
    def of(cls, step: StepInput, chunks: StepRows, boundary: Boundary) -> "ChunkRows | None":
        """None for a step without chunks."""
        if not len(chunks.slots):
            return None
        up, following = boundary.up, chunks.starts + chunks.counts
        request = np.repeat(np.arange(len(chunks.slots)), chunks.counts)
        offsets = np.arange(len(request)) - (np.cumsum(chunks.counts) - chunks.counts)[request]
        return cls(
            slots=up(chunks.slots),
            request=up(request),
            positions=up(chunks.starts[request] + offsets),
            token_ids=up(step.ids.astype(np.int64)),
            writes=up(offsets >= chunks.readonly[request]),
            final_slots=up(chunks.slots[chunks.final]),
            final_rows=up(np.cumsum(chunks.counts)[chunks.final] - 1),
            final_positions=up(following[chunks.final]),
            final_is_drawn=up((following < chunks.limits)[chunks.final]),
            max_visible=int(following.max()),
        )
