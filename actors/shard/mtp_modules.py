"""The MTP modules of a shard: run over rows, one after the other, each from the states of the one before it.

With the target as module -1: the row of module j in slot p takes t[p] and z[p-1] of module j-1, sees
slots mtp_from + j .. p of its own cache layer, and predicts t[p+1]. So every module is filled over the same
accepted rows; what it lacks is only the state before the first of them, which is kept from the fill before.
Draft i comes from module i modulo their number, n. Before it predicts, a module is run over the drafted
rows that it has not seen: those up to its own row, at most n.
Source: DeepSeek-V3 report, section 2.2; contracts/mtp.md 1, which this is for n = 1.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.model.model import Model
from kernels_integration.rows import RowBatch

Int64s = NDArray[np.int64]

RunModule = Callable[[int, Tensor, Tensor, RowBatch], Tensor]
"""(module, token_ids [T], previous states [T, hidden], rows) -> states [T, hidden]."""
MakeRows = Callable[[int, Int64s, Int64s, Int64s, Int64s | None], RowBatch]
"""(module, slots [b], starts [b], counts [b], readonly [b] or None) -> rows."""


class MtpModules:
    """Owner of the last state that each module but the last filled, per state slot.

    A state that is missing (nothing was filled yet, or rows fell out) makes a row of module j wrong that lies
    before mtp_from + j, where nobody sees it.
    """

    def __init__(self, model: Model, *, num_slots: int, run: RunModule, make_rows: MakeRows) -> None:
        self.num_modules = len(model.mtp_layers)
        self._run = run
        self._make_rows = make_rows
        handed_on = max(self.num_modules - 1, 0)
        self._last = torch.zeros(handed_on, num_slots, model.config.hidden_size, dtype=model.dtype)

    def fill(
        self,
        slots: Int64s,
        starts: Int64s,
        counts: Int64s,
        token_ids: Tensor,
        hidden: Tensor,
        readonly: Int64s | None = None,
    ) -> list[Tensor]:
        """Per module the states [b, hidden] of the last row of each request.

        Request b's rows are starts[b] .. starts[b] + counts[b] - 1, packed: token_ids [T] are t[p] and
        hidden [T, hidden] is h[p-1]. The first readonly[b] of them do not write.
        """
        ends, slot_ids = np.cumsum(counts), torch.from_numpy(slots)
        first_rows, last_rows = torch.from_numpy(ends - counts), torch.from_numpy(ends - 1)
        last_states: list[Tensor] = []
        previous = hidden
        for module in range(self.num_modules):
            rows = self._make_rows(module, slots, starts, counts, readonly)
            states = self._run(module, token_ids, previous, rows)
            last_states.append(states[last_rows])
            if module + 1 < self.num_modules:
                previous = states.roll(1, dims=0)
                previous[first_rows] = self._last[module, slot_ids]
                self._last[module, slot_ids] = last_states[module]
        return last_states

    def run_drafted(
        self, num_drafts: int, slots: Int64s, anchors: Int64s, drafts: Tensor, previous: Tensor
    ) -> Tensor:
        """The states [b, r, hidden] that the next draft comes from, after `num_drafts` >= 1 drafts.

        They are of the r = min(num_drafts, n) last drafted rows: drafts [b, r] are their tokens and previous
        [b, r, hidden] the states before them, of the module before; anchors [b] are the anchors' positions.
        """
        num_rows = drafts.shape[1]
        counts = np.full(len(slots), num_rows)
        module = num_drafts % self.num_modules
        rows = self._make_rows(module, slots, anchors + num_drafts + 1 - num_rows, counts, None)
        states = self._run(module, drafts.flatten(), previous.flatten(0, 1), rows)
        return states.view(len(slots), num_rows, -1)
