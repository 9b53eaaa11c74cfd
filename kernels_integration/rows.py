"""What one forward pass runs over: packed query rows, the KV each may see, and where each writes.

Every query token is its own row. Positions are global, slots are local to the DCP rank.
Shape legend: T packed rows, L local KV tokens of the longest request of a row group.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class Rows(Protocol):
    """What every form of rows tells; the rest is between who makes them and the backend that reads them.

    Row t sees positions visible_from[t]..visible_to[t] - 1. A row without KV (visible_to <= visible_from) is
    computed but attends to nothing.
    """

    @property
    def positions(self) -> Tensor:
        """[T] int64, global."""

    @property
    def visible_from(self) -> Tensor:
        """[T] int64: 0 for the target, `mtp_from` (>= 1) for the MTP layer."""

    @property
    def visible_to(self) -> Tensor:
        """[T] int64: position + 1, or 0 for a row without KV."""

    @property
    def max_visible(self) -> int:
        """At least visible_to - visible_from of every row: at most index_topk means attention is dense."""

    @property
    def num_rows(self) -> int: ...


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
    """Rows as a host lays them out: whoever makes them knows every length."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Rows of fixed shapes and addresses, whose values only the device knows (a replayed graph reads them).

    Rows that are not real have no KV: visible_to 0 and slot -1.
    """

    positions: Tensor
    """[T] int64, global."""
    visible_from: Tensor
    """[T] int64"""
    visible_to: Tensor
    """[T] int64; 0 for a row without KV."""
    slots: Tensor
    """[T] int64: where this rank stores the row's KV; -1: it does not."""
    request: Tensor
    """[T] int64: the row's request, a row of block_tables."""
    block_tables: Tensor
    """[B, blocks] int32 or int64: entry i of a request names the block of its local tokens
    i * block_size .. (i + 1) * block_size - 1; below 0 where it has none."""
    block_size: int
    max_visible: int
    """The host's upper bound of visible_to - visible_from."""
    rows_per_request: int = 1
    """R, where every request has R rows, which stand together and see from the same token on; else 1."""

    @property
    def num_rows(self) -> int:
        return self.positions.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """Row t attends to the slots kv_indices[kv_indptr[t]:kv_indptr[t + 1]] of this rank's cache.

    Per row ascending by position, no holes. This is what a plan is made of, so nothing is copied between.
    """

    kv_indptr: Tensor
    """[T + 1] int32, cumulative."""
    kv_indices: Tensor
    """[n] int32 or int64 local slots. On a device n is the most that there can be; the rest is not read."""
