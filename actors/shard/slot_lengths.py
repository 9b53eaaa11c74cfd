"""How far each state slot is. The shards go on by this alone; the coordinator hears of it in reports."""

import numpy as np
from numpy.typing import NDArray

from actors.messages import Admission, StepInput
from kernels_integration.errors import ProtocolError

Int64s = NDArray[np.int64]


def check_agreement(holds: bool | np.bool_, otherwise: str) -> None:
    """What a shard and its coordinator must both know. Errors: ProtocolError, which both sides are told."""
    if not holds:
        raise ProtocolError(f"the shard and the coordinator disagree: {otherwise}")


class SlotLengths:
    """Owner of every slot's admission, limit, length and anchor; set at admission, then by each step.

    All ranks of a group accept the same tokens, so they agree without talking.
    """

    def __init__(self, num_slots: int) -> None:
        self._admission = np.full(num_slots, -1, np.int64)
        self._limit = np.zeros(num_slots, np.int64)
        self._length = np.zeros(num_slots, np.int64)
        self._anchor = np.full(num_slots, -1, np.int64)

    def admit(self, admission: Admission) -> None:
        slot = admission.slot
        self._admission[slot] = admission.admission
        self._limit[slot] = admission.limit
        self._length[slot], self._anchor[slot] = 0, -1

    def limits(self, slots: Int64s) -> Int64s:
        """[b] rows at positions > limit - 2 are masked."""
        return self._limit[slots]

    def anchors(self, slots: Int64s) -> Int64s:
        """[b] the last token of each slot, whose KV the next verify computes."""
        return self._anchor[slots]

    def starts(self, step: StepInput, num_verifies: int) -> Int64s:
        """[N] position of each request's first row: a chunk's is in the message, a verify's only here.

        Where the message says what it expects of a verify, that must be the same. Errors: ProtocolError.
        """
        is_admitted = (self._admission[step.slot] == step.admission).all()
        check_agreement(is_admitted, "a row of a request not admitted here")
        starts = step.start.astype(np.int64)
        slots = step.slot[:num_verifies]
        said = np.flatnonzero(starts[:num_verifies] >= 0)
        starts[:num_verifies] = self._length[slots]
        check_agreement((starts[said] == step.start[said]).all(), "the coordinator expects another length")
        last = step.accepted[step.accepted_indptr[said + 1] - 1]
        check_agreement((self._anchor[slots[said]] == last).all(), "the coordinator accepted other tokens")
        return starts

    def advance(self, slots: Int64s, lengths: NDArray[np.int32]) -> None:
        """Tokens whose KV is held after a step."""
        self._length[slots] = lengths

    def emit(self, slots: Int64s, last_tokens: NDArray[np.int32]) -> None:
        """The last token that each slot emitted is its next anchor."""
        self._anchor[slots] = last_tokens
