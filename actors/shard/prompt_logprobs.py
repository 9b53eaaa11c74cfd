"""Log probabilities of prompt tokens, from the hidden states of chunk rows."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.messages import Admission
from actors.shard.boundary import Boundary
from actors.shard.step_rows import StepRows
from kernels_integration.collectives import Collectives
from kernels_integration.logprobs import Logprobs, logprobs_of
from kernels_integration.sampling import without_nan

_LOGITS_AT_ONCE = 1 << 22
"""Bounds the memory of a long chunk: 16 MiB of float32 logits on each rank."""

Int64s = NDArray[np.int64]


class PromptLogprobs:
    """Owner of the prompts whose tokens' log probabilities are asked for, per state slot."""

    def __init__(self, *, vocab_start: int, slice_size: int, boundary: Boundary) -> None:
        """vocab_start, slice_size: this rank's part of the vocabulary."""
        self._boundary = boundary
        self._vocab_start = vocab_start
        self._rows_at_once = max(1, _LOGITS_AT_ONCE // slice_size)
        self._prompts: dict[int, NDArray[np.int32]] = {}
        self._num_top: dict[int, int] = {}

    def admit(self, admission: Admission) -> None:
        self._prompts.pop(admission.slot, None)
        if admission.sampling.num_prompt_logprobs >= 0:
            self._prompts[admission.slot] = admission.history[: admission.prompt_len]
            self._num_top[admission.slot] = admission.sampling.num_prompt_logprobs

    def of_step(
        self,
        rows: StepRows,
        hidden: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        comm: Collectives,
    ) -> Logprobs | None:
        """Of the prompt tokens that the step's chunk rows predict; None when nobody asked. Collective.

        hidden: [T, hidden] of all rows of the step.
        """
        if not self._prompts:
            return None
        ends = np.cumsum(rows.counts)
        target_rows: list[Int64s] = []
        tokens: list[NDArray[np.int32]] = []
        num_top = 0
        for i in range(rows.num_verifies, len(rows.slots)):
            slot, start = int(rows.slots[i]), int(rows.starts[i])
            prompt = self._prompts.get(slot)
            if prompt is None:
                continue
            predicted = prompt[start + 1 : start + int(rows.counts[i]) + 1]
            first = int(ends[i] - rows.counts[i])
            target_rows.append(np.arange(first, first + len(predicted)))
            tokens.append(predicted)
            num_top = max(num_top, self._num_top[slot])
        if not sum(map(len, tokens)):
            return None
        asked = self._boundary.up(np.concatenate(target_rows))
        ids = self._boundary.up(np.concatenate(tokens).astype(np.int64))
        parts = [
            logprobs_of(without_nan(logits_of(hidden[part])), self._vocab_start, part_ids, num_top, comm)
            for part, part_ids in zip(
                torch.split(asked, self._rows_at_once), torch.split(ids, self._rows_at_once), strict=True
            )
        ]
        return Logprobs(
            sampled=torch.cat([part.sampled for part in parts]),
            top_ids=torch.cat([part.top_ids for part in parts]),
            top_values=torch.cat([part.top_values for part in parts]),
        )
