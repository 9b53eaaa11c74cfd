"""The row arithmetic of a step, on the contract's own example."""

import numpy as np
import pytest

from actors.messages import RowKind, StepInput
from actors.shard.step_rows import StepRows


def _step(kinds, ks, starts, chunk_lens=()) -> StepInput:
    n = len(kinds)
    lens = [0] * (n - len(chunk_lens)) + list(chunk_lens)
    indptr = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    empty = np.zeros(0, np.int32)
    zeros = np.zeros(n + 1, np.int32)
    return StepInput(
        epoch=0,
        step=0,
        slot=np.arange(n, dtype=np.int32),
        admission=np.arange(n, dtype=np.int32),
        kind=np.array(kinds, np.uint8),
        k=np.array(ks, np.uint8),
        fill=np.array(ks, np.uint8) > 0,
        start=np.array(starts, np.int32),
        readonly=np.zeros(n, np.uint8),
        ids=np.arange(indptr[-1], dtype=np.int32),
        ids_indptr=indptr,
        new_blocks=empty,
        new_blocks_indptr=zeros,
        accepted=empty,
        accepted_indptr=zeros,
    )


def test_verifies_then_chunks():
    verify, middle, final = RowKind.VERIFY, RowKind.MIDDLE_CHUNK, RowKind.FINAL_CHUNK
    rows = StepRows.of(_step([verify, verify, middle, final], [3, 1, 0, 0], [10, 20, 0, 5], [4, 2]))
    assert rows.counts.tolist() == [4, 2, 4, 2]
    assert rows.num_verify_rows == 6
    assert [rows.num_drafting(i) for i in range(4)] == [2, 1, 1, 0]
    target_rows, slots, positions = rows.sampled_rows()
    assert target_rows.tolist() == [0, 1, 2, 3, 4, 5, 11]
    assert slots.tolist() == [0, 0, 0, 0, 1, 1, 3]
    assert positions.tolist() == [11, 12, 13, 14, 21, 22, 7]


def test_the_contracts_example_of_step_metadata():
    """s = [4, 1, 3, 1, 2] in the message's order (k descending): bonus rows close each request."""
    s = sorted([4, 1, 3, 1, 2], reverse=True)
    rows = StepRows.of(_step([RowKind.VERIFY] * 5, [n - 1 for n in s], [0] * 5))
    assert np.cumsum(rows.k).tolist() == [3, 5, 6, 6, 6]
    assert (np.cumsum(rows.counts) - 1).tolist() == [3, 6, 8, 9, 10]


@pytest.mark.parametrize(("held", "length"), [(0, 11), (1, 12), (2, 13), (3, 14)])
def test_lengths_follow_the_acceptance_rule(held, length):
    rows = StepRows.of(_step([RowKind.VERIFY], [3], [10]))
    tokens = np.array([5, 6, 7, 8])
    drafts = np.array([5, 6, 7])
    if held < 3:
        drafts[held] = 99
    assert rows.lengths(drafts, tokens).tolist() == [length]


def test_a_draft_after_a_rejected_one_never_counts():
    rows = StepRows.of(_step([RowKind.VERIFY], [3], [10]))
    assert rows.lengths(np.array([0, 6, 7]), np.array([5, 6, 7, 8])).tolist() == [11]


def test_order_is_an_invariant():
    with pytest.raises(AssertionError, match="descending"):
        StepRows.of(_step([RowKind.VERIFY] * 2, [1, 2], [0, 0]))
    with pytest.raises(AssertionError, match="before chunks"):
        StepRows.of(_step([RowKind.MIDDLE_CHUNK, RowKind.VERIFY], [0, 1], [0, 0], [2]))
