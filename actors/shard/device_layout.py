"""The shapes of a step whose values only the device knows: decided on the host, from the message alone.

Requests that verify stand in a bucket of B, each with K + 1 rows; what a request lacks of either is rows that
are not real (contracts/device_step.md 3). Chunk rows are packed behind them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.messages import Admission, RowKind, StepInput
from actors.shard.step_rows import StepRows

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """What the shapes of a step's verifies follow from: one graph each."""

    num_places: int
    """B"""
    k_max: int
    """K"""
    num_fill_rows: int
    """F: at least the pending rows of every request that fills; 0 when none does."""
    max_visible: int
    """At least the tokens that any verify, draft or fill row sees."""
    has_filters: bool
    """Some request may be cut by top-k, top-p or min-p."""

    @property
    def num_verify_rows(self) -> int:
        return self.num_places * (self.k_max + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLayout:
    """Shapes and host-known values of one step. Of the B places the first V are taken."""

    shape: DecodeShape
    slots: Int64s
    """[B] state slot; `nobody` in places that are not taken."""
    k: Int64s
    """[B]"""
    fill: NDArray[np.bool_]
    """[B]"""
    num_verifies: int
    """V"""
    chunks: StepRows
    """Of the chunks alone."""
    has_rules: bool
    num_logprobs: int
    """The most alternatives asked for; -1: nobody asked."""
    logprob_rows: Int64s
    """Those asked for of the drawn rows: B * (K + 1) of verifies, then one of each final chunk."""

    @property
    def places(self) -> Int64s:
        """[3, B]: slots, k, and 1 where a request fills."""
        return np.stack((self.slots, self.k, self.fill.astype(np.int64)))

    @property
    def num_places(self) -> int:
        return self.shape.num_places

    @property
    def num_verify_rows(self) -> int:
        return self.shape.num_verify_rows

    def taken(self, width: int, num_taken: Int64s) -> Int64s:
        """Places in a flattened [B, width] of the first num_taken[v] columns of each of the V requests."""
        is_taken = np.arange(width) < num_taken[:, None]
        return np.flatnonzero(is_taken)


class HostView:
    """What the host decides by, per state slot: what admissions say, and bounds of what the device knows."""

    def __init__(self, num_slots: int, *, capacity: int, max_model_len: int, index_topk: int | None) -> None:
        """capacity: of pending rows. index_topk: None without an indexer."""
        self._capacity = capacity
        self._max_model_len = max_model_len
        self._index_topk = index_topk
        self.nobody = num_slots
        rows = num_slots + 1
        self._admission = np.full(rows, -1, np.int64)
        self._limit = np.zeros(rows, np.int64)
        self._most = np.zeros(rows, np.int64)
        """Upper bound of each length."""
        self._most_pending = np.zeros(rows, np.int64)
        self._carried_to = np.full(rows, -1, np.int64)
        self._num_blocks = np.zeros(rows, np.int64)
        self.has_rules = np.zeros(rows, bool)
        self._has_filters = np.zeros(rows, bool)
        self._num_logprobs = np.full(rows, -1, np.int64)

    def admit(self, admission: Admission) -> None:
        slot, spec = admission.slot, admission.sampling
        self._admission[slot] = admission.admission
        self._limit[slot] = admission.limit
        self._most[slot] = self._most_pending[slot] = self._num_blocks[slot] = 0
        self._carried_to[slot] = -1
        self.has_rules[slot] = spec.has_rules
        self._has_filters[slot] = spec.top_k > 0 or spec.top_p < 1 or spec.min_p > 0
        self._num_logprobs[slot] = spec.num_logprobs

    def add_blocks(self, step: StepInput) -> tuple[Int64s, Int64s, Int64s]:
        """(slots, table entries, blocks) of the step's new blocks."""
        counts = np.diff(step.new_blocks_indptr)
        slots = step.slot.astype(np.int64)
        request = np.repeat(np.arange(len(slots)), counts)
        offsets = np.arange(len(request)) - step.new_blocks_indptr[:-1][request]
        entries = self._num_blocks[slots][request] + offsets
        self._num_blocks[slots] += counts
        return slots[request], entries, step.new_blocks.astype(np.int64)

    def layout(self, step: StepInput) -> StepLayout:
        assert (self._admission[step.slot] == step.admission).all(), "a row of a request not admitted here"
        num_verifies = int((step.kind == RowKind.VERIFY).sum())
        num_places = self._bucket(num_verifies)
        slots = np.full(num_places, self.nobody)
        slots[:num_verifies] = step.slot[:num_verifies]
        k, fill = np.zeros(num_places, np.int64), np.zeros(num_places, bool)
        k[:num_verifies], fill[:num_verifies] = step.k[:num_verifies], step.fill[:num_verifies]
        taken, starts = slots[:num_verifies], step.start[:num_verifies]
        self._most[taken] = np.where(starts >= 0, starts, self._most[taken])
        chunks = self._chunks(step, num_verifies)
        drawing = np.concatenate([taken, chunks.slots[chunks.final]])
        asked = self._num_logprobs[drawing]
        k_max = int(k[0]) if num_verifies else 0
        after = np.minimum(self._most[taken] + k[:num_verifies] + 1, self._limit[taken] - 1)
        shape = DecodeShape(
            num_places=num_places,
            k_max=k_max,
            num_fill_rows=self._fill_bucket(int(self._most_pending[slots[fill]].max(initial=0)), k_max),
            max_visible=self._visible_bucket(int(after.max(initial=0))),
            has_filters=bool(self._has_filters[drawing].any()),
        )
        layout = StepLayout(
            shape=shape,
            slots=slots,
            k=k,
            fill=fill,
            num_verifies=num_verifies,
            chunks=chunks,
            has_rules=bool(self.has_rules[drawing].any()),
            num_logprobs=int(asked.max(initial=-1)),
            logprob_rows=_logprob_rows(asked, k[:num_verifies], num_places, k_max),
        )
        self._most[taken] = after
        pending = np.where(fill[:num_verifies], 0, self._most_pending[taken]) + k[:num_verifies] + 1
        self._most_pending[taken] = np.minimum(pending, self._capacity)
        self._most[chunks.slots] = chunks.starts + chunks.counts
        self._most_pending[chunks.slots[chunks.final]] = 1
        return layout

    def is_carried(self, chunks: StepRows) -> NDArray[np.bool_]:
        """Of each chunk, whether the state before its first row was carried there."""
        carried: NDArray[np.bool_] = self._carried_to[chunks.slots] == chunks.starts
        return carried

    def carry(self, chunks: StepRows) -> None:
        """The middle chunks have carried their last state on."""
        self._carried_to[chunks.slots[chunks.middle]] = (chunks.starts + chunks.counts)[chunks.middle]

    def _bucket(self, num_verifies: int) -> int:
        """The smallest bucket that holds them: a power of two, or all slots."""
        if not num_verifies:
            return 0
        return min(1 << (num_verifies - 1).bit_length(), self.nobody)

    def _fill_bucket(self, num_pending: int, k_max: int) -> int:
        """After a step of as many drafts at most K + 1 rows wait; otherwise all that may."""
        if num_pending <= k_max + 1:
            return k_max + 1 if num_pending else 0
        return self._capacity

    def _visible_bucket(self, num_visible: int) -> int:
        """Up to index_topk attention is dense, beyond it rows select; without an indexer: powers of two."""
        if self._index_topk is not None:
            return self._index_topk if num_visible <= self._index_topk else self._max_model_len
        return min(1 << max(num_visible - 1, 0).bit_length(), self._max_model_len)

    def _chunks(self, step: StepInput, num_verifies: int) -> StepRows:
        slots = step.slot[num_verifies:].astype(np.int64)
        none = np.zeros(0, np.int64)
        return StepRows(
            slots=slots,
            starts=step.start[num_verifies:].astype(np.int64),
            counts=np.diff(step.ids_indptr)[num_verifies:].astype(np.int64),
            limits=self._limit[slots],
            k=none,
            fill=none.astype(bool),
            readonly=step.readonly[num_verifies:].astype(np.int64),
            final=step.kind[num_verifies:] == RowKind.FINAL_CHUNK,
            middle=step.kind[num_verifies:] == RowKind.MIDDLE_CHUNK,
            num_verifies=0,
            num_verify_rows=0,
        )


def _logprob_rows(asked: Int64s, k: Int64s, num_places: int, k_max: int) -> Int64s:
    """asked: of the V verifies, then of the final chunks, the alternatives asked for."""
    is_asked = asked >= 0
    verify_rows = np.arange(k_max + 1) < np.where(is_asked[: len(k)], k + 1, 0)[:, None]
    finals = num_places * (k_max + 1) + np.flatnonzero(is_asked[len(k) :])
    return np.concatenate([np.flatnonzero(verify_rows), finals])
