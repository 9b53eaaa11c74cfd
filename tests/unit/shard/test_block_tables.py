"""Block tables: rows, slots and groups against a token-by-token reading of the contract."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.shard.block_tables import BlockTables
from kernels_integration.dcp import DcpGroup
from kernels_integration.errors import PlanError
from tests.support.boundaries import ON_CPU

NO_LIMIT = 10_000


class _Rank:
    """A set of ranks of which only rank and size are asked."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def _tables(rank: int, size: int, interleave: int, block_size: int, num_blocks: int = 64) -> BlockTables:
    dcp = DcpGroup(interleave=interleave, comm=_Rank(rank, size))
    return BlockTables(
        num_slots=4,
        max_model_len=200,
        block_size=block_size,
        num_kv_blocks=num_blocks,
        dcp=dcp,
        boundary=ON_CPU,
    )


def _expected_slot(g: int, table: list[int], rank: int, size: int, interleave: int, block_size: int) -> int:
    """slot(g) of the contract, -1 where another rank owns g."""
    if (g // interleave) % size != rank:
        return -1
    local = (g // (interleave * size)) * interleave + g % interleave
    return table[g // (block_size * size)] * block_size + local % block_size


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 2, 4]),
    block_exp=st.integers(0, 4),
    interleave_exp=st.integers(0, 4),
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 9)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_every_row_writes_and_sees_what_the_contract_says(size, block_exp, interleave_exp, requests, seed):
    block_size, interleave = 2**block_exp, 2 ** min(interleave_exp, block_exp)
    shuffled = np.random.default_rng(seed).permutation(512).astype(np.int32)
    tables_of = {}
    used = 0
    for slot, (start, count) in enumerate(requests):
        need = -(-(start + count) // (block_size * size))
        tables_of[slot] = shuffled[used : used + need]
        used += need
    written: dict[tuple[int, int], int] = {}
    for rank in range(size):
        tables = _tables(rank, size, interleave, block_size, num_blocks=512)
        for slot, blocks in tables_of.items():
            tables.append(slot, blocks[:1])
            tables.append(slot, blocks[1:])
        slots = np.arange(len(requests))
        starts = np.array([s for s, _ in requests])
        counts = np.array([c for _, c in requests])
        batch = tables.rows(slots, starts, counts, limits=np.full(len(slots), NO_LIMIT))

        flat = [(b, s + i) for b, (s, c) in enumerate(requests) for i in range(c)]
        assert batch.positions.tolist() == [p for _, p in flat]
        assert batch.visible_to.tolist() == [p + 1 for _, p in flat]
        assert batch.max_visible == max(p + 1 for _, p in flat)
        by_row = dict(zip(batch.write_rows.tolist(), batch.write_slots.tolist(), strict=True))
        for row, (b, p) in enumerate(flat):
            expected = _expected_slot(p, tables_of[b].tolist(), rank, size, interleave, block_size)
            assert by_row.get(row, -1) == expected
            if expected >= 0:
                written[(rank, expected)] = written.get((rank, expected), 0) + 1

        assert batch.groups[0].row_start == 0
        assert batch.groups[-1].row_end == len(flat)
        for group in batch.groups:
            for local_request in range(group.num_requests):
                for i in range(group.rows_per_request):
                    row = group.row_start + local_request * group.rows_per_request + i
                    b, p = flat[row]
                    seen = {
                        int(g): int(s)
                        for g, s in zip(group.kv_positions, group.kv_slots[local_request], strict=True)
                        if g <= p
                    }
                    table = tables_of[b].tolist()
                    own = {
                        g: slot
                        for g in range(p + 1)
                        if (slot := _expected_slot(g, table, rank, size, interleave, block_size)) >= 0
                    }
                    assert seen == own
    assert len(written) == sum(c for _, c in requests), "every position has exactly one owner"
    assert set(written.values()) == {1}


def test_readonly_rows_are_computed_but_not_written():
    tables = _tables(0, 1, 1, 16)
    tables.append(0, np.array([3, 5], np.int32))
    batch = tables.rows(
        np.array([0]), np.array([15]), np.array([3]), limits=np.array([NO_LIMIT]), readonly=np.array([1])
    )
    assert batch.num_rows == 3
    assert batch.write_rows.tolist() == [1, 2]
    assert batch.write_slots.tolist() == [5 * 16, 5 * 16 + 1]


def test_neighbours_with_equal_counts_share_a_group():
    tables = _tables(0, 1, 1, 16)
    for slot in range(4):
        tables.append(slot, np.array([slot], np.int32))
    batch = tables.rows(
        np.arange(4), np.array([0, 3, 5, 1]), np.array([4, 4, 1, 4]), limits=np.full(4, NO_LIMIT)
    )
    assert [(g.row_start, g.num_requests, g.rows_per_request) for g in batch.groups] == [
        (0, 2, 4),
        (8, 1, 1),
        (9, 1, 4),
    ]
    assert batch.groups[0].kv_slots.shape == (2, 7)


def test_a_row_without_a_block_is_refused():
    tables = _tables(0, 1, 1, 16)
    tables.append(0, np.array([7], np.int32))
    with pytest.raises(PlanError, match="position 16 has no block"):
        tables.rows(np.array([0]), np.array([14]), np.array([3]), limits=np.array([NO_LIMIT]))


def test_a_reset_slot_forgets_its_blocks():
    tables = _tables(0, 1, 1, 16)
    tables.append(0, np.array([7, 8], np.int32))
    tables.reset(0)
    tables.append(0, np.array([1], np.int32))
    assert tables.rows(
        np.array([0]), np.array([2]), np.array([1]), limits=np.array([NO_LIMIT])
    ).write_slots.tolist() == [18]
    with pytest.raises(PlanError):
        tables.rows(np.array([0]), np.array([16]), np.array([1]), limits=np.array([NO_LIMIT]))


@pytest.mark.parametrize("block", [-1, 64])
def test_a_block_outside_the_pool_is_refused(block):
    with pytest.raises(PlanError, match=r"within 0\.\.63"):
        _tables(0, 1, 1, 16).append(0, np.array([block], np.int32))


def test_a_table_past_the_longest_request_is_refused():
    tables = _tables(0, 1, 1, 16)  # 200 tokens: 13 blocks
    tables.append(0, np.arange(13, dtype=np.int32))
    with pytest.raises(PlanError, match="would hold 14 blocks"):
        tables.append(0, np.array([20], np.int32))


def test_rows_leave_the_tables_untouched():
    tables = _tables(1, 2, 4, 16)
    tables.append(2, np.array([9], np.int32))
    first = tables.rows(np.array([2]), np.array([0]), np.array([20]), limits=np.array([NO_LIMIT]))
    second = tables.rows(np.array([2]), np.array([0]), np.array([20]), limits=np.array([NO_LIMIT]))
    assert torch.equal(first.groups[0].kv_slots, second.groups[0].kv_slots)


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_rows_beyond_the_limit_see_and_write_nothing(rank, size):
    """Limit 20: position 18 is the last. The second request has no row left, and no block for one."""
    tables = _tables(rank, size, 1, 16 // size)
    for slot in range(2):
        tables.append(slot, np.array([4 + 2 * slot, 5 + 2 * slot], np.int32))
    starts, counts, limits = np.array([17, 199]), np.array([4, 4]), np.array([20, 200])
    batch = tables.rows(np.arange(2), starts, counts, limits=limits)
    assert batch.visible_to.tolist() == [18, 19, 0, 0, 0, 0, 0, 0]
    assert batch.max_visible == 19
    assert batch.write_rows.tolist() == [
        row for row, position in [(0, 17), (1, 18)] if position % size == rank
    ]
    only_masked = tables.rows(np.array([1]), np.array([199]), np.array([2]), limits=np.array([200]))
    assert only_masked.max_visible == 0
    assert len(only_masked.write_rows) == 0
