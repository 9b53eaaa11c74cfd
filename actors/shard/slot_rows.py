"""The rows of a pass, from what is known of their state slots."""

import numpy as np
from numpy.typing import NDArray

from actors.shard.block_tables import BlockTables
from actors.shard.pending import PendingRows
from actors.shard.slot_lengths import SlotLengths
from actors.shard.step_rows import StepRows
from kernels_integration.rows import RowBatch

Int64s = NDArray[np.int64]


class SlotRows:
    """Makes rows: tables say where KV lies, lengths where a request ends, pending what modules see."""

    def __init__(self, tables: BlockTables, lengths: SlotLengths, pending: PendingRows) -> None:
        self._tables = tables
        self._lengths = lengths
        self._pending = pending

    def target(self, rows: StepRows) -> RowBatch:
        return self._tables.rows(
            rows.slots, rows.starts, rows.counts, limits=rows.limits, readonly=rows.readonly
        )

    def mtp(
        self, module: int, slots: Int64s, starts: Int64s, counts: Int64s, readonly: Int64s | None = None
    ) -> RowBatch:
        """Rows starts[b] .. starts[b] + counts[b] - 1 of each request in this module's cache layer.

        The first readonly[b] of them do not write.
        """
        return self._tables.rows(
            slots,
            starts,
            counts,
            limits=self._lengths.limits(slots),
            visible_from=self._pending.mtp_from(slots) + module,
            readonly=readonly,
        )
