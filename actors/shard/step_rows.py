"""A step's message, unpacked into the row arithmetic that draft, verify and report share."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.messages import RowKind, StepInput
from actors.shard.slot_rules import Preceding

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    k: Int64s
    """[num_verifies]"""
    fill: NDArray[np.bool_]
    """[num_verifies]"""
    readonly: Int64s
    """[N] leading rows that do not write."""
    final: NDArray[np.bool_]
    """[N] a final chunk."""
    num_verifies: int
    num_verify_rows: int

    @classmethod
    def of(cls, step: StepInput) -> "StepRows":
        is_verify = step.kind == RowKind.VERIFY
        num_verifies = int(is_verify.sum())
        k = step.k[:num_verifies].astype(np.int64)
        assert is_verify[:num_verifies].all(), "verifies stand before chunks"
        assert (np.diff(k) <= 0).all(), "verifies are ordered by k, descending"
        counts = np.diff(step.ids_indptr).astype(np.int64)
        counts[:num_verifies] = k + 1
        return cls(
            slots=step.slot.astype(np.int64),
            starts=step.start.astype(np.int64),
            counts=counts,
            k=k,
            fill=step.fill[:num_verifies].astype(bool),
            readonly=step.readonly.astype(np.int64),
            final=step.kind == RowKind.FINAL_CHUNK,
            num_verifies=num_verifies,
            num_verify_rows=int(counts[:num_verifies].sum()),
        )

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    def num_drafting(self, i: int) -> int:
        """Requests that take more than i drafts; they stand first."""
        return int((self.k > i).sum())

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

    def preceding(self, drafts: Int64s) -> Preceding:
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

    def lengths(self, drafts: Int64s, tokens: Int64s) -> NDArray[np.int32]:
        """[N] tokens whose KV the shard holds after the step, by the acceptance rule (contracts/mtp.md 4).

        A verify adds the anchor and its drafts up to the first that differs from the target's token.
        """
        lengths = self.starts + self.counts
        tokens_end = np.cumsum(self.k + 1)
        drafts_end = np.cumsum(self.k)
        for i, k in enumerate(self.k.tolist()):
            own = tokens[tokens_end[i] - k - 1 : tokens_end[i] - 1]
            held = drafts[drafts_end[i] - k : drafts_end[i]] == own
            lengths[i] = self.starts[i] + 1 + int(np.logical_and.accumulate(held).sum())
        return lengths.astype(np.int32)
