"""What the cache holds in fp8_ds_mla is a function of the tokens: the same bytes however rows were batched.

In float64. Products differ in their last bits (2^-52) between batches; a stored byte changes only where a
value lies that near to the middle between two e4m3 numbers, or a tile's largest between two float32s, which
in this computation happens about once in 10^8 scales.
"""

import pytest
import torch

from tests.support.model_ranks import Rank, run_ranks
from tests.support.model_rows import Chunk
from tests.support.random_checkpoint import write_random_checkpoint

LENGTH = 90


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("random"))


def token_ids(request: int) -> list[int]:
    generator = torch.Generator().manual_seed(request)
    return torch.randint(3, 101, (LENGTH,), generator=generator).tolist()


def written(rank: Rank, steps: list[list[Chunk]]) -> dict[int, bytes]:
    """By position, the bytes of request 1 in all layers of this rank, after the target and the MTP layer."""
    for chunks in steps:
        ids = [token for c in chunks for token in token_ids(c.request)[c.start : c.start + c.count]]
        hidden = rank.forward(chunks, ids)
        # Row i of the MTP layer is position i + 1: the token there, and the target's state at i.
        shifted = [Chunk(c.request, c.start + 1, c.count) for c in chunks]
        following = [
            t for c in chunks for t in (*token_ids(c.request), 3)[c.start + 1 : c.start + 1 + c.count]
        ]
        rank.mtp_forward(shifted, following, hidden)
    tables = [vectors.storage for vectors in (*rank.cache.latents, *rank.cache.keys) if vectors.num_slots]
    assert all(table.dtype == torch.uint8 for table in tables)
    return {
        position: b"".join(table[slot].numpy().tobytes() for table in tables)
        for position, slot in rank.slots.owned(1, LENGTH)
    }


def rank_of(checkpoint, **parts) -> Rank:
    return Rank(
        checkpoint,
        torch.float64,
        num_requests=3,
        capacity=LENGTH + 1,
        num_mtp_layers=1,
        kv_cache_dtype="fp8_ds_mla",
        **parts,
    )


STEPS = {
    "one chunk": [[Chunk(1, 0, LENGTH)]],
    "one by one": [[Chunk(1, i, 1)] for i in range(LENGTH)],
    "uneven chunks": [[Chunk(1, 0, 7)], [Chunk(1, 7, 60)], [Chunk(1, 67, 4)], [Chunk(1, 71, LENGTH - 71)]],
    "beside others": [
        [Chunk(0, 0, 40), Chunk(1, 0, 33)],
        [Chunk(1, 33, 4), Chunk(0, 40, 4), Chunk(2, 0, 50)],
        [Chunk(2, 50, 20), Chunk(1, 37, LENGTH - 37)],
    ],
    "rewritten": [[Chunk(1, 0, 80)], [Chunk(1, 60, 30)]],  # as after rejected drafts and prefix hits
}


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict[int, bytes]:
    found = written(rank_of(checkpoint), STEPS["one chunk"])
    assert len(set(found.values())) == LENGTH, "positions must differ to tell anything"
    return found


@pytest.mark.parametrize("steps", list(STEPS))
def test_any_batch_writes_the_same_bytes(checkpoint, expected, steps) -> None:
    assert written(rank_of(checkpoint), STEPS[steps]) == expected


@pytest.mark.parametrize("topology", [(2, 1, 1), (2, 2, 1), (4, 4, 4)])
def test_any_topology_writes_the_same_bytes(checkpoint, expected, topology) -> None:
    """Under DCP each rank holds its own positions; together they hold all of them, once."""
    tp_size, dcp_size, interleave = topology
    parts = run_ranks(
        tp_size,
        dcp_size,
        interleave,
        lambda tp, dcp: written(rank_of(checkpoint, tp=tp, dcp=dcp), STEPS["beside others"]),
    )
    assert sum(len(part) for part in parts[:dcp_size]) == LENGTH
    for part in parts:
        assert part == {position: expected[position] for position in part}
