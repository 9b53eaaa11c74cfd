"""Rows in the form that the kernels read: what each sees of this rank's tokens, and where it is stored."""

import torch
from torch import Tensor

from kernels_integration.dcp import DcpGroup
from kernels_integration.rows import DeviceRows, RowBatch, RowGroup, Rows
from kernels_integration.triton.local_rows import LocalRows


def local_rows(rows: Rows, dcp: DcpGroup) -> LocalRows:
    """Which local tokens each row sees. Never waits for the device."""
    if isinstance(rows, RowBatch):
        return _rows_of_groups(rows)
    assert isinstance(rows, DeviceRows)
    is_alone = dcp.size == 1
    return LocalRows(
        visible_from=rows.visible_from if is_alone else dcp.local_length(rows.visible_from),
        visible_to=rows.visible_to if is_alone else dcp.local_length(rows.visible_to),
        request=rows.request,
        page_table=rows.block_tables,
        page_size=rows.block_size,
        max_visible=rows.max_visible,
        rows_per_request=rows.rows_per_request,
    )


def slots_of(rows: Rows) -> Tensor:
    """[T] int64: where this rank stores the row's KV; -1: it does not."""
    if isinstance(rows, DeviceRows):
        return rows.slots
    assert isinstance(rows, RowBatch)
    slots = rows.positions.new_full((rows.num_rows,), -1)
    return slots.index_copy_(0, rows.write_rows, rows.write_slots)


def _rows_of_groups(rows: RowBatch) -> LocalRows:
    """A page table of slots, as wide as the longest group's."""
    device = rows.positions.device
    width = max((group.kv_slots.shape[1] for group in rows.groups), default=0)
    num_requests = sum(group.num_requests for group in rows.groups)
    page_table = torch.zeros(num_requests, max(width, 1), dtype=torch.int64, device=device)
    request = torch.empty(rows.num_rows, dtype=torch.int64, device=device)
    visible_from, visible_to = torch.empty_like(request), torch.empty_like(request)
    first = 0
    for group in rows.groups:
        own = slice(group.row_start, group.row_end)
        page_table[first : first + group.num_requests, : group.kv_slots.shape[1]] = group.kv_slots
        index = torch.arange(first, first + group.num_requests, device=device)
        request[own] = index.repeat_interleave(group.rows_per_request)
        visible_from[own] = _local(rows.visible_from[own], group)
        visible_to[own] = _local(rows.visible_to[own], group)
        first += group.num_requests
    return LocalRows(
        visible_from=visible_from,
        visible_to=visible_to,
        request=request,
        page_table=page_table,
        page_size=1,
        max_visible=min(rows.max_visible, width),
    )


def _local(bounds: Tensor, group: RowGroup) -> Tensor:
    """How many local tokens lie below each global position."""
    return torch.searchsorted(group.kv_positions, bounds.contiguous())
