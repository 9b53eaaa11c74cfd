"""Rows in the form that the torch backend reads, and the writing of their KV."""

import torch
from torch import Tensor

from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.rows import DeviceRows, RowBatch, RowGroup, Rows


def in_groups(rows: Rows, dcp: DcpGroup) -> RowBatch:
    """The same rows with slots and positions of their KV. Rows of a device are read on the host."""
    if isinstance(rows, RowBatch):
        return rows
    assert isinstance(rows, DeviceRows)
    longest = int(rows.visible_to.max()) if rows.num_rows else 0
    local = torch.arange(dcp.local_length(longest), device=rows.positions.device)
    tables = rows.block_tables.index_select(0, rows.request).long().clamp_min_(0)
    blocks = tables.index_select(1, local // rows.block_size)
    group = RowGroup(
        row_start=0,
        num_requests=rows.num_rows,
        rows_per_request=1,
        kv_slots=blocks * rows.block_size + local % rows.block_size,
        kv_positions=dcp.global_position(local),
    )
    written = _written(rows)
    return RowBatch(
        positions=rows.positions,
        visible_from=rows.visible_from,
        visible_to=rows.visible_to,
        write_rows=written,
        write_slots=rows.slots[written],
        groups=(group,) if rows.num_rows else (),
        max_visible=rows.max_visible,
    )


def store(values: Tensor, cache: StoredVectors, rows: Rows) -> None:
    """Write the rows of values [T, dim] that this rank owns, in the cache's format.

    A slot outside the cache raises IndexError (on a GPU: a device-side assertion).
    """
    if isinstance(rows, RowBatch):
        written, slots = rows.write_rows, rows.write_slots
    else:
        assert isinstance(rows, DeviceRows)
        written = _written(rows)
        slots = rows.slots[written]
    if written.shape[0] == 0:
        return
    # They ascend, so as many of them as rows are all rows, in order.
    if written.shape[0] != rows.num_rows:
        values = values.index_select(0, written)
    cache.write(slots, values)


def _written(rows: DeviceRows) -> Tensor:
    return (rows.slots >= 0).nonzero().squeeze(1)
