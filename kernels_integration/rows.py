"""What one forward pass runs over: packed query rows, the KV each may see, and where each writes.

Every query token is its own row. Positions are global, slots are local to the DCP rank.
Shape legend: T packed rows, L local KV tokens of the longest request of a row group.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Consecutive rows of `num_requests` requests that bring `rows_per_request` rows each.

    Rows `row_start + b * rows_per_request + i` belong to the group's request b.
    """

    row_start: int
    num_requests: int
    rows_per_request: int
    kv_slots: Tensor
    """[num_requests, L] int64: slot of local KV token j; any legal slot where a request has fewer."""
    kv_positions: Tensor
    """[L] int64: global position of local KV token j on this rank (ascending)."""

    @property
    def row_end(self) -> int:
        return self.row_start + self.num_requests * self.rows_per_request


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """The rows of one forward pass on one rank. Row t sees positions visible_from[t]..visible_to[t]-1.

    A row without KV (visible_to <= visible_from) is computed but attends to nothing.
    """

    positions: Tensor
    """[T] int64, global."""
    visible_from: Tensor
    """[T] int64: 0 for the target, `mtp_from` (>= 1) for the MTP layer."""
    visible_to: Tensor
    """[T] int64: position + 1, or 0 for a row without KV."""
    write_rows: Tensor
    """[n] int64, ascending: rows whose KV this rank owns and stores."""
    write_slots: Tensor
    """[n] int64: their local slots, all different."""
    groups: tuple[RowGroup, ...]
    """Cover rows 0..T-1 in order."""
    max_visible: int
    """Largest visible_to - visible_from of any row: at most index_topk means attention is dense."""

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]
