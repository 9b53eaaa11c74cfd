"""Block tables of all state slots, and the rows that a forward pass makes of them.

Arithmetic on rows is done on the host (NumPy); only [requests, L] slot tables are made on the device.
Source: contracts in contracts/dcp.md (slots, owners), contracts/mtp.md (what a row sees).
"""

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.shard.boundary import Boundary
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import PlanError
from kernels_integration.rows import RowBatch, RowGroup

Int64s = NDArray[np.int64]

_UNALLOCATED = -1


class BlockTables:
    """Owner of the block tables of this rank; one row a state slot.

    A table entry covers `block_size * dcp` global tokens and names the same block on every rank.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_kv_blocks: int,
        dcp: DcpGroup,
        boundary: Boundary,
    ) -> None:
        self._dcp = dcp
        self._block_size = block_size
        self._tokens_per_block = block_size * dcp.size
        self._num_kv_blocks = num_kv_blocks
        max_blocks = -(-max_model_len // self._tokens_per_block)
        self._boundary = boundary
        self._host = np.full((num_slots, max_blocks), _UNALLOCATED, np.int64)
        self._used = np.zeros(num_slots, np.int64)
        local = torch.arange(max_blocks * block_size, device=boundary.device)
        self._block_of_local = local // block_size
        self._offset_of_local = local % block_size
        self._position_of_local = dcp.global_position(local)

    def reset(self, slot: int) -> None:
        """Empty a slot's table (admission)."""
        self._host[slot] = _UNALLOCATED
        self._used[slot] = 0

    def append(self, slot: int, blocks: NDArray[np.int32]) -> None:
        """Add blocks to the end of a slot's table.

        Errors: PlanError for a block outside the pool or a table past max_model_len.
        """
        used = int(self._used[slot])
        end = used + len(blocks)
        if end > self._host.shape[1]:
            raise PlanError(
                f"slot {slot} would hold {end} blocks; max_model_len allows {self._host.shape[1]}"
            )
        if ((blocks < 0) | (blocks >= self._num_kv_blocks)).any():
            raise PlanError(f"blocks {blocks.tolist()} are not all within 0..{self._num_kv_blocks - 1}")
        self._host[slot, used:end] = blocks
        self._used[slot] = end

    def rows(
        self,
        slots: Int64s,
        starts: Int64s,
        counts: Int64s,
        *,
        limits: Int64s,
        visible_from: Int64s | None = None,
        readonly: Int64s | None = None,
    ) -> RowBatch:
        """The rows `starts[b] .. starts[b] + counts[b] - 1` of each request b, packed in order.

        limits: rows of request b at positions > limits[b] - 2 are masked: they see and write no KV.
        visible_from: first position that request b's rows see (default 0).
        readonly: how many leading rows of request b do not write their KV (default none).
        Errors: PlanError when a row's block is not in its table.
        """
        indptr = np.concatenate(([0], np.cumsum(counts)))
        num_rows = int(indptr[-1])
        request = np.repeat(np.arange(len(slots)), counts)
        row_in_request = np.arange(num_rows) - indptr[:-1][request]
        positions = starts[request] + row_in_request
        first = np.zeros(num_rows, np.int64) if visible_from is None else visible_from[request]
        has_kv = positions < limits[request] - 1

        writes = has_kv if self._dcp.size == 1 else has_kv & (self._dcp.owner(positions) == self._dcp.rank)
        if readonly is not None:
            writes = writes & (row_in_request >= readonly[request])
        entries = np.minimum(positions // self._tokens_per_block, self._host.shape[1] - 1)
        blocks = self._host[slots[request], entries]
        if num_rows and (has_kv & (blocks < 0)).any():
            missing = int(positions[has_kv & (blocks < 0)][0])
            raise PlanError(f"position {missing} has no block in its request's table")
        local = self._dcp.local_index(positions)
        write_slots = (blocks * self._block_size + local % self._block_size)[writes]

        visible_to = np.where(has_kv, positions + 1, 0)
        return RowBatch(
            positions=self._boundary.up(positions),
            visible_from=self._boundary.up(first),
            visible_to=self._boundary.up(visible_to),
            write_rows=self._boundary.up(np.flatnonzero(writes)),
            write_slots=self._boundary.up(write_slots),
            groups=self._groups(slots, np.minimum(starts + counts, limits - 1), counts, indptr),
            max_visible=int((visible_to - first).max(initial=0)),
        )

    def _groups(self, slots: Int64s, ends: Int64s, counts: Int64s, indptr: Int64s) -> tuple[RowGroup, ...]:
        """One group for each run of neighbours with equally many rows. ends: [b] tokens that they see."""
        edges = np.flatnonzero(np.diff(counts)) + 1
        bounds = [0, *edges.tolist(), len(counts)] if len(counts) else [0]
        groups = []
        for begin, end in itertools.pairwise(bounds):
            longest = int(ends[begin:end].max())
            num_local = int(self._dcp.local_length(longest))
            groups.append(
                RowGroup(
                    row_start=int(indptr[begin]),
                    num_requests=end - begin,
                    rows_per_request=int(counts[begin]),
                    kv_slots=self._kv_slots(slots[begin:end], num_local),
                    kv_positions=self._position_of_local[:num_local],
                )
            )
        return tuple(groups)

    def _kv_slots(self, slots: Int64s, num_local: int) -> Tensor:
        """[requests, num_local]: slots of local tokens; past a request's table, slot 0 (never selected)."""
        tables = self._boundary.up(np.maximum(self._host[slots], 0))
        per_token = tables.index_select(1, self._block_of_local[:num_local])
        return per_token.mul_(self._block_size).add_(self._offset_of_local[:num_local])
