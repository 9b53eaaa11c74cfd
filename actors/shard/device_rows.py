"""Rows of fixed shapes: positions that only the device knows, tables that lie there.

Shape legend: T rows, B requests.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.shard.boundary import Boundary
from actors.shard.device_state import DeviceState
from kernels_integration.dcp import DcpGroup
from kernels_integration.rows import DeviceRows

Int64s = NDArray[np.int64]


class DeviceRowMaker:
    """Makes the rows of a pass from the slots' state; nothing is read back."""

    def __init__(self, state: DeviceState, dcp: DcpGroup, *, block_size: int, boundary: Boundary) -> None:
        self._state = state
        self._dcp = dcp
        self._block_size = block_size
        self._boundary = boundary

    def make(
        self,
        slots: Tensor,
        request: Tensor,
        positions: Tensor,
        is_real: Tensor,
        *,
        max_visible: int,
        visible_from: Tensor | None = None,
        writes: Tensor | None = None,
        rows_per_request: int = 1,
    ) -> DeviceRows:
        """Row t, at positions[t], is of slots[request[t]].

        slots [B]; request, positions, is_real [T]: rows that are not real have no KV; visible_from [B]
        (default 0); writes [T]: which real rows store their KV (default all). rows_per_request: as in
        `DeviceRows`.
        """
        owners = slots.index_select(0, request)
        # Position limit - 1 is nobody's to write: the last token's KV is never needed.
        is_real = is_real & (positions <= self._state.limit.index_select(0, owners) - 2)
        tables = self._state.block_table.index_select(0, slots)
        local = self._dcp.local_index(positions)
        entry = (local // self._block_size).clamp(0, tables.shape[1] - 1)
        block = tables.view(-1).index_select(0, request * tables.shape[1] + entry)
        stored = is_real if writes is None else is_real & writes
        if self._dcp.size > 1:
            stored = stored & (self._dcp.owner(positions) == self._dcp.rank)
        first = torch.zeros_like(positions) if visible_from is None else visible_from.index_select(0, request)
        return DeviceRows(
            positions=positions,
            visible_from=first,
            visible_to=torch.where(is_real, positions + 1, 0),
            slots=torch.where(stored, block * self._block_size + local % self._block_size, -1),
            request=request,
            block_tables=tables,
            block_size=self._block_size,
            max_visible=max_visible,
            rows_per_request=rows_per_request,
        )

    def mtp(
        self, module: int, slots: Int64s, starts: Int64s, counts: Int64s, readonly: Int64s | None = None
    ) -> DeviceRows:
        """As `MtpRowMaker.mtp`."""
        up = self._boundary.up
        request = np.repeat(np.arange(len(slots)), counts)
        offsets = np.arange(len(request)) - (np.cumsum(counts) - counts)[request]
        writes = None if readonly is None else up(offsets >= readonly[request])
        on_device = up(slots)
        return self.make(
            on_device,
            up(request),
            up(starts[request] + offsets),
            torch.ones(len(request), dtype=torch.bool, device=self._boundary.device),
            max_visible=int((starts + counts).max()),
            visible_from=self._state.mtp_from.index_select(0, on_device) + module,
            writes=writes,
        )
