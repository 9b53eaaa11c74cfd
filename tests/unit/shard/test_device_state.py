"""The slots' state on a device against lists, and against `PendingRows`, which the host keeps."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.shard.device_state import DeviceState
from actors.shard.pending import PendingRows
from tests.support.boundaries import ON_CPU
from tests.support.steps import admission

CAPACITY, NUM_SLOTS, WIDTH = 8, 4, 5


def device_state() -> DeviceState:
    return DeviceState(
        num_slots=NUM_SLOTS,
        max_blocks=6,
        capacity=CAPACITY,
        hidden_size=2,
        dtype=torch.float64,
        boundary=ON_CPU,
    )


STEPS = st.lists(
    st.lists(  # per slot: emitted (None: not in the step), filled, admitted anew
        st.tuples(
            st.one_of(st.none(), st.integers(0, WIDTH)), st.booleans(), st.sampled_from([False] * 9 + [True])
        ),
        min_size=NUM_SLOTS,
        max_size=NUM_SLOTS,
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_pending_rows_are_those_that_the_host_would_keep(steps) -> None:
    """Rows fall out, are filled and forgotten alike; requests that are not there leave no trace."""
    state = device_state()
    pending = PendingRows(
        num_slots=NUM_SLOTS, capacity=CAPACITY, hidden_size=2, dtype=torch.float64, boundary=ON_CPU
    )
    lengths = [0] * NUM_SLOTS
    state.admit(tuple(admission(slot) for slot in range(NUM_SLOTS)))
    for step, members in enumerate(steps):
        for slot, (_, _, is_admitted) in enumerate(members):
            if is_admitted:
                state.admit((admission(slot),))
                pending.reset(slot)
                lengths[slot] = 0
        present = [slot for slot, (emitted, _, _) in enumerate(members) if emitted is not None]
        places = np.array([*present, state.nobody, state.nobody])
        slots, on_host = torch.from_numpy(places), np.array(present, np.int64)
        filling = np.array([members[slot][1] for slot in present], bool)
        fills = torch.from_numpy(np.append(filling, [False, False]))
        positions, tokens, hidden = state.pending(slots, CAPACITY)
        found = pending.take(on_host[filling & (pending.counts(on_host) > 0)])
        counts = state.pending_count[slots]
        rows = [
            (place, i) for place, is_filled in enumerate(fills) if is_filled for i in range(counts[place])
        ]
        index = tuple(torch.tensor(rows, dtype=torch.int64).view(-1, 2).T)
        assert tokens[index].tolist() == found.token_ids.tolist()
        assert torch.equal(hidden[index], found.hidden)
        starts = [int(positions[p, 0]) for p, f in enumerate(fills) if f and counts[p]]
        assert starts == found.starts.tolist()
        state.take_pending(slots, fills)

        emitted = np.array([members[slot][0] for slot in present], np.int64)
        first = np.array([lengths[slot] + 1 for slot in present], np.int64)
        drawn = torch.arange(len(places) * WIDTH).view(-1, WIDTH) + 100 * step
        states = torch.stack((drawn, -drawn), dim=-1).double()
        state.emit(
            slots,
            torch.from_numpy(np.append(first, [3, 4])),
            torch.from_numpy(np.append(emitted, [0, 0])),
            drawn,
            states,
        )
        kept = torch.arange(WIDTH) < torch.from_numpy(np.append(emitted, [0, 0])).unsqueeze(1)
        pending.store(on_host, first, emitted, drawn[kept].numpy().astype(np.int32), states[kept])
        for slot, num in zip(present, emitted.tolist(), strict=True):
            lengths[slot] += num
        every = np.arange(NUM_SLOTS)
        assert state.pending_count[:-1].tolist() == pending.counts(every).tolist()
        assert state.mtp_from[:-1].tolist() == pending.mtp_from(every).tolist()
        anchors = [int(drawn[p, n - 1]) for p, n in enumerate(emitted.tolist()) if n]
        yielding = [slot for slot, n in zip(present, emitted.tolist(), strict=True) if n]
        assert state.anchor[yielding].tolist() == anchors


def test_an_admission_leaves_nothing_of_the_slots_former_owner() -> None:
    state, anew = device_state(), device_state()
    old = admission(2, limit=9, temperature=0.7, top_p=0.3, min_p=0.1, top_k=4, seed=2**64 - 1)
    state.admit((old, admission(1)))
    state.add_blocks(np.array([2, 2, 1]), np.array([0, 1, 0]), np.array([5, 4, 3]))
    slots, states = torch.tensor([2, 1]), torch.ones(2, 3, 2).double()
    for start in (1, 4, 7, 10):  # until rows fall out
        state.emit(slots, torch.tensor([start, start]), torch.tensor([3, 3]), torch.ones(2, 3).long(), states)
    state.length[2] = 12
    state.take_pending(torch.tensor([2]), torch.tensor([True]))
    assert int(state.mtp_from[2]) == 5
    new = admission(2, limit=30, top_k=-1)
    state.admit((new,))
    anew.admit((new,))
    for name in (
        "length", "anchor", "limit", "mtp_from", "pending_start", "pending_count", "fell_out", "block_table"
    ):  # fmt: skip
        assert torch.equal(getattr(state, name)[2], getattr(anew, name)[2]), name
    found = state.sampling_rows(torch.tensor([2]), torch.tensor([7]), None)
    assert (float(found.temperature), int(found.top_k), float(found.top_p)) == (0.0, 0, 1.0)
    assert (float(found.min_p), int(found.seed)) == (0.0, 7)
    assert state.block_table[1].tolist() == [3, -1, -1, -1, -1, -1]
