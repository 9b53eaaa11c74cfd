"""The MTP modules of a shard: run over rows, one after the other, each from the states of the one before it.

With the target as module -1: the row of module j in slot p takes t[p] and z[p-1] of module j-1, sees
slots mtp_from + j .. p of its own cache layer, and predicts t[p+1]. So every module is filled over the same
accepted rows; what it lacks is only the state before the first of them, which is kept from the fill before.
Draft i comes from module i modulo their number, n. Before it predicts, a module is run over the drafted
rows that it has not seen: those up to its own row, at most n.
Source: DeepSeek-V3 report, section 2.2; contracts/mtp.md 1, which this is for n = 1.
"""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.model.model import Model
from actors.shard.boundary import Boundary
from kernels_integration.kv_cache import KVCache
from kernels_integration.rows import Rows

Int64s = NDArray[np.int64]


class MtpRowMaker(Protocol):
    def mtp(
        self, module: int, slots: Int64s, starts: Int64s, counts: Int64s, readonly: Int64s | None = None
    ) -> Rows:
        """Rows starts[b] .. starts[b] + counts[b] - 1 of each request in this module's cache layer, packed.

        The first readonly[b] of them do not write.
        """
        ...


class MtpModules:
    """Owner of the last state that each module but the last filled, per state slot.

    A state that is missing (nothing was filled yet, or rows fell out) makes a row of module j wrong that lies
    before mtp_from + j, where nobody sees it.
    """

    def __init__(
        self, model: Model, cache: KVCache, row_maker: MtpRowMaker, *, num_slots: int, boundary: Boundary
    ) -> None:
        self.num_modules = len(model.mtp_layers)
        self._model = model
        self._cache = cache
        self._row_maker = row_maker
        self._boundary = boundary
        shape = (max(self.num_modules - 1, 0), num_slots, model.config.hidden_size)
        self.last = torch.zeros(shape, dtype=model.dtype, device=boundary.device)

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
        up, ends = self._boundary.up, np.cumsum(counts)
        slot_ids, first_rows, last_rows = up(slots), up(ends - counts), up(ends - 1)
        last_states: list[Tensor] = []
        previous = hidden
        for module in range(self.num_modules):
            rows = self._row_maker.mtp(module, slots, starts, counts, readonly)
            states = self._model.mtp_forward(token_ids, previous, rows, self._cache, module=module)
            last_states.append(states[last_rows])
            if module + 1 < self.num_modules:
                previous = states.roll(1, dims=0)
                previous[first_rows] = self.last[module, slot_ids]
                self.last[module, slot_ids] = last_states[module]
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
        rows = self._row_maker.mtp(module, slots, anchors + num_drafts + 1 - num_rows, counts)
        states = self._model.mtp_forward(
            drafts.flatten(), previous.flatten(0, 1), rows, self._cache, module=module
        )
        return states.view(len(slots), num_rows, -1)
