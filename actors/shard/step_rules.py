"""Rules on logits in a step of fixed shapes: the host applies them, and so waits for what they count."""

import numpy as np
from torch import Tensor

from actors.shard.boundary import Boundary
from actors.shard.device_layout import StepLayout
from actors.shard.slot_rules import Preceding, SlotRules
from kernels_integration.logit_rules import LogitRules
from kernels_integration.token_marks import MASKED


class StepRules:
    """The rules of one step's requests. Shape legend: B places, K drafts."""

    def __init__(self, rules: SlotRules, layout: StepLayout, boundary: Boundary) -> None:
        self._rules = rules
        self._layout = layout
        self._boundary = boundary
        self._final_slots = layout.chunks.slots[layout.chunks.final]

    def of_drafts(self, positions: Tensor, before: Tensor) -> LogitRules | None:
        """Of the drafts at positions [B], each after `before` [B, i]."""
        num_places, num_before = before.shape
        preceding = Preceding(
            tokens=before.flatten(),
            first=np.arange(num_places) * num_before,
            count=np.full(num_places, num_before),
        )
        return self._rules.gather(self._layout.slots, self._boundary.down(positions), preceding)

    def of_verify(self, positions: Tensor, drafts: Tensor) -> LogitRules | None:
        """Of the B * (K + 1) verify rows and the final chunks; i of drafts [B, K] stand before row i."""
        num_places, k_max = drafts.shape
        none = np.zeros(len(self._final_slots), np.int64)
        preceding = Preceding(
            tokens=drafts.flatten(),
            first=np.concatenate([np.repeat(np.arange(num_places) * k_max, k_max + 1), none]),
            count=np.concatenate([np.tile(np.arange(k_max + 1), num_places), none]),
        )
        slots = np.concatenate([np.repeat(self._layout.slots, k_max + 1), self._final_slots])
        return self._rules.gather(slots, self._boundary.down(positions), preceding)

    def count(self, drawn: Tensor, num_emitted: Tensor) -> None:
        """What was accepted of the drawn rows, num_emitted [B] of each verify, belongs to the completions."""
        tokens, layout = self._boundary.down(drawn).astype(np.int32), self._layout
        verified = tokens[: layout.num_verify_rows].reshape(layout.num_places, layout.shape.k_max + 1)
        counts = self._boundary.down(num_emitted)
        for place, slot in enumerate(layout.slots[: layout.num_verifies].tolist()):
            self._rules.append(slot, np.maximum(verified[place, : counts[place]], 0))
        finals = tokens[layout.num_verify_rows :]
        for i, slot in enumerate(self._final_slots.tolist()):
            if finals[i] != MASKED:
                self._rules.append(slot, np.maximum(finals[i : i + 1], 0))
