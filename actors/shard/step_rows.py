"""A step's message, unpacked into the row arithmetic that draft, verify and report share."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from actors.acceptance import count_emitted
from actors.messages import RowKind, StepInput
from actors.shard.slot_lengths import SlotLengths, check_agreement
from actors.shard.slot_rules import Preceding

Int64s = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)  # without slots: what several phases ask for is computed once
class StepRows:
    """N scheduled requests, verifies first by k descending, then chunks.

    Target rows are packed in that order: k + 1 rows a verify (the anchor and its drafts), then the
    chunks' rows.
    """

    slots: Int64s
    """[N] state slot."""
    starts: Int64s
    """[N] position of the first row."""
    counts: Int64s
    """[N] target rows."""
    limits: Int64s
    """[N] rows at positions > limit - 2 are masked: they have no KV, and their token is -1."""
    k: Int64s
    """[num_verifies]"""
    fill: NDArray[np.bool_]
    """[num_verifies]"""
    readonly: Int64s
    """[N] leading rows that do not write."""
    final: NDArray[np.bool_]
    """[N] a final chunk."""
    middle: NDArray[np.bool_]
    """[N] a middle chunk."""
    num_verifies: int
    num_verify_rows: int

    @classmethod
    def of(cls, step: StepInput, lengths: SlotLengths) -> "StepRows":
        is_verify = step.kind == RowKind.VERIFY
        num_verifies = int(is_verify.sum())
        k = step.k[:num_verifies].astype(np.int64)
        check_agreement(is_verify[:num_verifies].all(), "verifies stand before chunks")
        check_agreement((np.diff(k) <= 0).all(), "verifies are ordered by k, descending")
        counts = np.diff(step.ids_indptr).astype(np.int64)
        counts[:num_verifies] = k + 1
        slots = step.slot.astype(np.int64)
        return cls(
            slots=slots,
            starts=lengths.starts(step, num_verifies),
            counts=counts,
            limits=lengths.limits(slots),
            k=k,
            fill=step.fill[:num_verifies].astype(bool),
            readonly=step.readonly.astype(np.int64),
            final=step.kind == RowKind.FINAL_CHUNK,
            middle=step.kind == RowKind.MIDDLE_CHUNK,
            num_verifies=num_verifies,
            num_verify_rows=int(counts[:num_verifies].sum()),
        )

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    def num_drafting(self, i: int) -> int:
        """Requests that take more than i drafts; they stand first."""
        return int((self.k > i).sum())

    @cached_property
    def sampled_rows(self) -> tuple[Int64s, Int64s, Int64s]:
        """Rows whose token is drawn: every verify row, then the last row of each final chunk.

        Returns target row [M], state slot [M], and position of the token drawn [M] (row position + 1).
        """
        v = self.num_verifies
        ends = np.cumsum(self.counts)
        rows = np.concatenate([np.arange(self.num_verify_rows), ends[self.final] - 1])
        slots = np.concatenate([np.repeat(self.slots[:v], self.counts[:v]), self.slots[self.final]])
        first_rows = np.repeat(ends[:v] - self.counts[:v], self.counts[:v])
        verify_positions = (
            np.repeat(self.starts[:v], self.counts[:v]) + rows[: self.num_verify_rows] - first_rows
        )
        chunk_positions = (self.starts + self.counts - 1)[self.final]
        return rows, slots, np.concatenate([verify_positions, chunk_positions]) + 1

    @cached_property
    def token_limits(self) -> Int64s:
        """[M] limits of the requests of `sampled_rows`: a token drawn for there or beyond is masked."""
        v = self.num_verifies
        return np.concatenate([np.repeat(self.limits[:v], self.counts[:v]), self.limits[self.final]])

    def preceding(self, drafts: Tensor) -> Preceding:
        """The drafts before each of `sampled_rows`; drafts: [sum k], packed by request."""
        num_tokens = self.k + 1
        first_rows = np.cumsum(num_tokens) - num_tokens
        num_final = int(self.final.sum())
        offsets = np.arange(self.num_verify_rows) - np.repeat(first_rows, num_tokens)
        none = np.zeros(num_final, np.int64)
        return Preceding(
            tokens=drafts,
            first=np.concatenate([np.repeat(np.cumsum(self.k) - self.k, num_tokens), none]),
            count=np.concatenate([offsets, none]),
        )

    @cached_property
    def token_slots(self) -> Int64s:
        """[Y] slots of the requests that yield tokens: verifies, then final chunks."""
        return np.concatenate([self.slots[: self.num_verifies], self.slots[self.final]])

    @cached_property
    def token_starts(self) -> Int64s:
        """[Y] position of the first token that each of them yields."""
        ends = (self.starts + self.counts)[self.final]
        return np.concatenate([self.starts[: self.num_verifies] + 1, ends])

    @cached_property
    def token_counts(self) -> Int64s:
        """[Y] drawn tokens of each: k + 1, or 1 of a final chunk."""
        return np.concatenate([self.k + 1, np.ones(int(self.final.sum()), np.int64)])

    def num_emitted(self, drafts: Int64s, tokens: Int64s) -> Int64s:
        """[Y] accepted tokens of each, by the acceptance rule; drafts [sum k], tokens [M]."""
        return count_emitted(drafts, tokens, self.token_counts - 1)

    def emitted(self, num_emitted: Int64s) -> Int64s:
        """Which of the M drawn tokens were accepted: the first num_emitted[y] of each request."""
        ends = np.cumsum(num_emitted)
        firsts = np.cumsum(self.token_counts) - self.token_counts
        return np.repeat(firsts - (ends - num_emitted), num_emitted) + np.arange(int(num_emitted.sum()))

    def lengths(self, num_emitted: Int64s) -> NDArray[np.int32]:
        """[N] tokens whose KV is held after the step: a verify adds the anchor and its accepted drafts."""
        lengths = self.starts + self.counts
        lengths[: self.num_verifies] = self.starts[: self.num_verifies] + num_emitted[: self.num_verifies]
        return lengths.astype(np.int32)
