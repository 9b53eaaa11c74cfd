"""Row batches over scattered slots, built position by position from the definitions of the DCP contract."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels_integration.dcp import DcpGroup
from kernels_integration.rows import DeviceRows, RowBatch, RowGroup


@dataclass(frozen=True)
class Chunk:
    """Rows for positions start .. start + count - 1 of a request."""

    request: int
    start: int
    count: int


class SlotMap:
    """Where the tokens of requests of at most `capacity` tokens live: shuffled slots per rank."""

    def __init__(self, num_requests: int, capacity: int, dcp: DcpGroup) -> None:
        self.dcp = dcp
        self.num_slots = num_requests * capacity + 7
        order = list(range(self.num_slots))
        random.Random(dcp.rank).shuffle(order)
        self._slots = [order[r * capacity : (r + 1) * capacity] for r in range(num_requests)]

    def owned(self, request: int, end: int) -> list[tuple[int, int]]:
        """(position, slot) of the tokens below `end` that this rank holds."""
        positions = [g for g in range(end) if self.dcp.owner(g) == self.dcp.rank]
        return [(g, self._slots[request][i]) for i, g in enumerate(positions)]

    def rows(self, chunks: Sequence[Chunk], visible_from: int = 0) -> RowBatch:
        """The rows of the chunks in order; neighbours of equal length become one group."""
        positions, write_rows, write_slots = [], [], []
        groups: list[list[Chunk]] = []
        for chunk in chunks:
            owned = dict(self.owned(chunk.request, chunk.start + chunk.count))
            for g in range(chunk.start, chunk.start + chunk.count):
                if g in owned:
                    write_rows.append(len(positions))
                    write_slots.append(owned[g])
                positions.append(g)
            if groups and groups[-1][0].count == chunk.count:
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        row, row_groups = 0, []
        for group in groups:
            row_groups.append(self._group(row, group))
            row = row_groups[-1].row_end
        p = torch.tensor(positions, dtype=torch.int64)
        return RowBatch(
            positions=p,
            visible_from=torch.full_like(p, visible_from),
            visible_to=p + 1,
            write_rows=torch.tensor(write_rows, dtype=torch.int64),
            write_slots=torch.tensor(write_slots, dtype=torch.int64),
            groups=tuple(row_groups),
            max_visible=max(positions) + 1 - visible_from,
        )

    def device_rows(
        self, chunks: Sequence[Chunk], visible_from: int = 0, device: torch.device | str = "cpu"
    ) -> DeviceRows:
        """The same rows in fixed shapes; blocks are of one token."""
        positions, request, slots = [], [], []
        for chunk in chunks:
            owned = dict(self.owned(chunk.request, chunk.start + chunk.count))
            for g in range(chunk.start, chunk.start + chunk.count):
                positions.append(g)
                request.append(chunk.request)
                slots.append(owned.get(g, -1))
        p = torch.tensor(positions, dtype=torch.int64, device=device)
        return DeviceRows(
            positions=p,
            visible_from=torch.full_like(p, visible_from),
            visible_to=p + 1,
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            request=torch.tensor(request, dtype=torch.int64, device=device),
            block_tables=torch.tensor(self._slots, dtype=torch.int64, device=device),
            block_size=1,
            max_visible=max(positions) + 1 - visible_from,
        )

    def _group(self, row_start: int, chunks: Sequence[Chunk]) -> RowGroup:
        owned = [self.owned(c.request, c.start + c.count) for c in chunks]
        longest = max(owned, key=len)
        slots = torch.zeros(len(chunks), len(longest), dtype=torch.int64)
        for b, tokens in enumerate(owned):
            slots[b, : len(tokens)] = torch.tensor([slot for _, slot in tokens], dtype=torch.int64)
        return RowGroup(
            row_start=row_start,
            num_requests=len(chunks),
            rows_per_request=chunks[0].count,
            kv_slots=slots,
            kv_positions=torch.tensor([g for g, _ in longest], dtype=torch.int64),
        )
