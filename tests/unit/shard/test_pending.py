"""Pending rows against a list that remembers every (position, token, state)."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.shard.pending import PendingRows
from tests.support.boundaries import ON_CPU

CAPACITY = 8


def _state(slot: int, position: int) -> list[float]:
    return [float(slot), float(position)]


class _Slot:
    """What one slot should hold: rows (position, token), and where the MTP layer's KV begins."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.mtp_from = 1
        self.fell_out = False
        self.length = 1


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 5), st.booleans()),
        min_size=1,
        max_size=30,
    )
)
def test_rows_wait_in_order_and_old_ones_fall_out(steps):
    pending = PendingRows(num_slots=3, capacity=CAPACITY, hidden_size=2, dtype=torch.float64, boundary=ON_CPU)
    model = [_Slot() for _ in range(3)]
    for slot, accepted, fill in steps:
        expected = model[slot]
        start = expected.length
        states = torch.tensor([_state(slot, start + i) for i in range(accepted)], dtype=torch.float64)
        excess = len(expected.rows) + accepted - CAPACITY
        if excess > 0:
            expected.rows = expected.rows[excess:]
            expected.fell_out = True
        tokens = np.arange(accepted, dtype=np.int32) + 100 * start
        pending.store(np.array([slot]), np.array([start]), np.array([accepted]), tokens, states)
        expected.rows += [(start + i, int(t)) for i, t in enumerate(tokens)]
        expected.length += accepted
        assert pending.counts(np.array([slot])).tolist() == [len(expected.rows)]
        if fill:
            taken = pending.take(np.array([slot]))
            first = expected.rows[0][0]
            assert taken.starts.tolist() == [first]
            assert taken.counts.tolist() == [len(expected.rows)]
            assert taken.token_ids.tolist() == [t for _, t in expected.rows]
            assert taken.hidden.tolist() == [_state(slot, p) for p, _ in expected.rows]
            if expected.fell_out:
                expected.mtp_from, expected.fell_out = first, False
            assert pending.mtp_from(np.array([slot])).tolist() == [expected.mtp_from]
            expected.rows = []


def test_several_requests_are_packed_in_the_order_asked():
    pending = PendingRows(num_slots=3, capacity=CAPACITY, hidden_size=2, dtype=torch.float64, boundary=ON_CPU)
    slots, starts, counts = np.array([2, 0]), np.array([5, 9]), np.array([2, 1])
    tokens = np.array([50, 60, 90], np.int32)
    states = torch.tensor([_state(2, 5), _state(2, 6), _state(0, 9)]).double()
    pending.store(slots, starts, counts, tokens, states)
    taken = pending.take(np.array([0, 2]))
    assert taken.token_ids.tolist() == [90, 50, 60]
    assert taken.hidden.tolist() == [_state(0, 9), _state(2, 5), _state(2, 6)]


def test_a_chunk_carries_its_last_state_on():
    pending = PendingRows(num_slots=2, capacity=CAPACITY, hidden_size=2, dtype=torch.float64, boundary=ON_CPU)
    one = np.array([1])
    assert not pending.is_carried(one, np.array([64])).any()
    pending.carry(one, np.array([64]), torch.tensor([_state(1, 64)]).double())
    assert pending.is_carried(one, np.array([64])).all()
    assert pending.take_carried(one).tolist() == [_state(1, 64)]
    pending.carry(one, np.array([128]), torch.tensor([_state(1, 128)]).double())
    assert pending.take_carried(one).tolist() == [_state(1, 128)]
    pending.store(one, np.array([150]), one, np.array([7], np.int32), torch.tensor([_state(1, 150)]).double())
    taken = pending.take(one)
    assert (taken.starts.tolist(), taken.token_ids.tolist()) == ([150], [7])
    assert taken.hidden.tolist() == [_state(1, 150)]


def test_a_request_may_have_nothing_to_store_or_take():
    pending = PendingRows(num_slots=2, capacity=CAPACITY, hidden_size=2, dtype=torch.float64, boundary=ON_CPU)
    states = torch.tensor([_state(1, 5)]).double()
    pending.store(np.array([0, 1]), np.array([9, 5]), np.array([0, 1]), np.array([3], np.int32), states)
    taken = pending.take(np.array([0, 1]))
    assert taken.counts.tolist() == [0, 1]
    assert taken.token_ids.tolist() == [3]


def test_an_admission_starts_afresh():
    pending = PendingRows(num_slots=1, capacity=2, hidden_size=2, dtype=torch.float64, boundary=ON_CPU)
    none, one = np.array([0]), np.array([1])
    for start in (1, 2, 3):
        state = torch.tensor([_state(0, start)]).double()
        pending.store(none, np.array([start]), one, np.array([start], np.int32), state)
    pending.take(none)
    assert pending.mtp_from(none).tolist() == [2]
    pending.reset(0)
    assert pending.mtp_from(none).tolist() == [1]
    assert pending.counts(none).tolist() == [0]


def test_an_admission_forgets_what_was_carried():
    pending = PendingRows(num_slots=1, capacity=2, hidden_size=2, dtype=torch.float64, boundary=ON_CPU)
    none, at = np.array([0]), np.array([9])
    pending.carry(none, at, torch.tensor([_state(0, 9)]).double())
    pending.reset(0)
    assert not pending.is_carried(none, at).any()
