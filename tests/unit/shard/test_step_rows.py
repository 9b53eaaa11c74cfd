"""The row arithmetic of a step, on the contract's own example."""

import numpy as np
import pytest

from actors.messages import Admission, RowKind, SamplingSpec, StepInput
from actors.shard.slot_lengths import SlotLengths
from actors.shard.step_rows import StepRows
from kernels_integration.errors import ProtocolError
from kernels_integration.token_marks import MASKED


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


def _rows(kinds, ks, starts, chunk_lens=()) -> StepRows:
    """As a shard unpacks them that has come so far; the message does not know where its verifies start."""
    progress = SlotLengths(len(kinds))
    for slot in range(len(kinds)):
        progress.admit(
            Admission(slot=slot, admission=slot, limit=1000, prompt_len=1, seed=0, sampling=SamplingSpec())
        )
    progress.advance(np.arange(len(kinds)), np.array(starts, np.int32))
    sent = [-1 if kind == RowKind.VERIFY else start for kind, start in zip(kinds, starts, strict=True)]
    return StepRows.of(_step(kinds, ks, sent, chunk_lens), progress)


def test_verifies_then_chunks():
    verify, middle, final = RowKind.VERIFY, RowKind.MIDDLE_CHUNK, RowKind.FINAL_CHUNK
    rows = _rows([verify, verify, middle, final], [3, 1, 0, 0], [10, 20, 0, 5], [4, 2])
    assert rows.counts.tolist() == [4, 2, 4, 2]
    assert rows.num_verify_rows == 6
    assert [rows.num_drafting(i) for i in range(4)] == [2, 1, 1, 0]
    target_rows, slots, positions = rows.sampled_rows
    assert target_rows.tolist() == [0, 1, 2, 3, 4, 5, 11]
    assert slots.tolist() == [0, 0, 0, 0, 1, 1, 3]
    assert positions.tolist() == [11, 12, 13, 14, 21, 22, 7]


def test_the_contracts_example_of_step_metadata():
    """s = [4, 1, 3, 1, 2] in the message's order (k descending): bonus rows close each request."""
    s = sorted([4, 1, 3, 1, 2], reverse=True)
    rows = _rows([RowKind.VERIFY] * 5, [n - 1 for n in s], [0] * 5)
    assert np.cumsum(rows.k).tolist() == [3, 5, 6, 6, 6]
    assert (np.cumsum(rows.counts) - 1).tolist() == [3, 6, 8, 9, 10]


@pytest.mark.parametrize(("held", "length"), [(0, 11), (1, 12), (2, 13), (3, 14)])
def test_lengths_follow_the_acceptance_rule(held, length):
    rows = _rows([RowKind.VERIFY], [3], [10])
    tokens = np.array([5, 6, 7, 8])
    drafts = np.array([5, 6, 7])
    if held < 3:
        drafts[held] = 99
    assert rows.lengths(rows.num_emitted(drafts, tokens)).tolist() == [length]


def test_emitted_tokens_of_a_mixed_step():
    verify, middle, final = RowKind.VERIFY, RowKind.MIDDLE_CHUNK, RowKind.FINAL_CHUNK
    rows = _rows([verify, verify, verify, middle, final], [2, 1, 0, 0, 0], [10, 20, 30, 0, 5], [4, 2])
    drafts = np.array([1, 9, 4])
    tokens = np.array([1, 2, 3, 4, 5, MASKED, 7])
    num_emitted = rows.num_emitted(drafts, tokens)
    assert num_emitted.tolist() == [2, 2, 0, 1]
    assert tokens[rows.emitted(num_emitted)].tolist() == [1, 2, 4, 5, 7]
    assert rows.lengths(num_emitted).tolist() == [12, 22, 30, 4, 7]
    assert rows.token_slots.tolist() == [0, 1, 2, 4]
    assert rows.token_starts.tolist() == [11, 21, 31, 7]


def test_a_message_that_expects_another_length_is_an_error():
    progress = SlotLengths(1)
    progress.admit(Admission(slot=0, admission=0, limit=99, prompt_len=1, seed=0, sampling=SamplingSpec()))
    progress.advance(np.array([0]), np.array([10], np.int32))
    with pytest.raises(ProtocolError, match="another length"):
        StepRows.of(_step([RowKind.VERIFY], [1], [9]), progress)


def test_order_is_an_invariant():
    with pytest.raises(ProtocolError, match="descending"):
        _rows([RowKind.VERIFY] * 2, [1, 2], [0, 0])
    with pytest.raises(ProtocolError, match="before chunks"):
        _rows([RowKind.MIDDLE_CHUNK, RowKind.VERIFY], [0, 1], [0, 0], [2])
