"""The block manager alone: reservations, order of reuse, nothing lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.coordinator.blocks import BlockManager


def test_reservations_cover_positions() -> None:
    blocks = BlockManager(num_blocks=5, tokens_per_block=4)
    blocks.open(1)
    assert blocks.reservable_tokens(1) == 20
    assert blocks.reserve(1, 1) == [0]
    assert blocks.reserve(1, 4) == []
    assert blocks.reserve(1, 13) == [1, 2, 3]
    assert blocks.table(1) == (0, 1, 2, 3)
    assert (blocks.reserved_tokens(1), blocks.reservable_tokens(1)) == (16, 20)
    assert (blocks.num_free, blocks.num_used) == (1, 4)


def test_freed_blocks_are_reused_oldest_first_and_a_tables_end_before_its_beginning() -> None:
    blocks = BlockManager(num_blocks=4, tokens_per_block=1)
    for admission in (1, 2):
        blocks.open(admission)
        blocks.reserve(admission, 2)
    blocks.release(2)
    blocks.release(1)
    blocks.open(3)
    assert blocks.reserve(3, 4) == [3, 2, 1, 0]


@pytest.mark.parametrize(("tokens", "entries"), [(0, 0), (1, 1), (8, 1), (9, 2), (16, 2)])
def test_blocks_for(tokens, entries) -> None:
    assert BlockManager(num_blocks=1, tokens_per_block=8).blocks_for(tokens) == entries


@given(
    st.lists(st.tuples(st.sampled_from(["open", "grow", "release"]), st.integers(0, 3), st.integers(0, 40))),
    st.integers(1, 12),
    st.integers(1, 8),
)
def test_every_block_has_one_owner(actions, num_blocks, tokens_per_block) -> None:
    blocks = BlockManager(num_blocks=num_blocks, tokens_per_block=tokens_per_block)
    lengths: dict[int, int] = {}
    for action, admission, num_tokens in actions:
        if action == "open" and admission not in lengths:
            blocks.open(admission)
            lengths[admission] = 0
        elif action == "release" and admission in lengths:
            blocks.release(admission)
            del lengths[admission]
        elif action == "grow" and admission in lengths and num_tokens <= blocks.reservable_tokens(admission):
            before = blocks.table(admission)
            added = blocks.reserve(admission, num_tokens)
            assert blocks.table(admission) == (*before, *added)
            lengths[admission] = max(lengths[admission], num_tokens)
        owned = [b for a in lengths for b in blocks.table(a)]
        assert len(set(owned)) == len(owned) == blocks.num_used
        assert blocks.num_used + blocks.num_free == num_blocks
        for a, length in lengths.items():
            assert len(blocks.table(a)) == -(-length // tokens_per_block)
