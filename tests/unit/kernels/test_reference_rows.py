"""Rows of a device mean what the same rows of a host mean."""

import pytest
import torch

from kernels_integration.collectives import SoloCollectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.reference.backend import TorchBackend
from kernels_integration.rows import DeviceRows

BACKEND = TorchBackend()
BLOCK = 4


class Ranked(SoloCollectives):
    """One rank of several, for what needs no exchange."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def rows(positions: list[int], requests: list[int], tables: torch.Tensor, dcp: DcpGroup) -> DeviceRows:
    """Rows at these positions, -1: not real; they store what the rank owns."""
    p = torch.tensor(positions)
    slots = []
    for position, request in zip(positions, requests, strict=True):
        mine = position >= 0 and dcp.owner(position) == dcp.rank
        local = dcp.local_index(position)
        slots.append(int(tables[request, local // BLOCK]) * BLOCK + local % BLOCK if mine else -1)
    return DeviceRows(
        positions=p.clamp(min=0),
        visible_from=torch.zeros_like(p),
        visible_to=p + 1,
        slots=torch.tensor(slots),
        request=torch.tensor(requests),
        block_tables=tables,
        block_size=BLOCK,
        max_visible=max(positions) + 1,
    )


@pytest.mark.parametrize(("size", "interleave"), [(1, 1), (2, 1), (2, 4), (3, 2)])
def test_visible_tokens_are_those_of_the_block_tables(size, interleave):
    """Position by position from the definitions of the DCP contract."""
    tables = torch.tensor([[7, 2, 5, 0], [1, 6, 3, -1]])
    positions, requests = [0, 9, -1, 10, 3], [0, 0, 0, 1, 1]
    for rank in range(size):
        dcp = DcpGroup(interleave, Ranked(rank, size))
        selection = BACKEND.select_visible(rows(positions, requests, tables, dcp), dcp)
        indptr = selection.kv_indptr.tolist()
        for row, (position, request) in enumerate(zip(positions, requests, strict=True)):
            owned = [g for g in range(position + 1) if dcp.owner(g) == rank]
            expected = [
                int(tables[request, dcp.local_index(g) // BLOCK]) * BLOCK + dcp.local_index(g) % BLOCK
                for g in owned
            ]
            assert selection.kv_indices[indptr[row] : indptr[row + 1]].tolist() == expected


def test_top_k_reads_the_same_keys_and_stores_only_real_rows():
    torch.manual_seed(0)
    solo = DcpGroup(1, SoloCollectives())
    tables = torch.tensor([[7, 2, 5, 0], [1, 6, 3, -1]])
    positions, requests = [12, -1, 9, 2], [0, 0, 1, 1]
    batch = rows(positions, requests, tables, solo)
    keys = torch.randn(32, 6)
    q, weights = torch.randn(4, 2, 6), torch.randn(4, 2)
    selection = BACKEND.select_topk(q, weights, StoredVectors.plain(keys), batch, 3, solo)
    indptr = selection.kv_indptr.tolist()
    for row, (position, request) in enumerate(zip(positions, requests, strict=True)):
        slots = [int(tables[request, g // BLOCK]) * BLOCK + g % BLOCK for g in range(position + 1)]
        scores = [(weights[row] * (q[row] @ keys[s] * 6**-0.5).relu()).sum().item() for s in slots]
        best = sorted(sorted(range(len(slots)), key=lambda g: -scores[g])[:3])
        assert selection.kv_indices[indptr[row] : indptr[row + 1]].tolist() == [slots[g] for g in best]

    cache = StoredVectors.plain(torch.zeros(32, 6))
    values = torch.randn(4, 6)
    norm, bias, eps = torch.ones(6), torch.zeros(6), 1e-6
    rope = BACKEND.rotary_table(batch.positions, torch.zeros(1), 1.0)
    BACKEND.write_index_keys(values.clone(), norm, bias, eps, rope, cache, batch)
    written = batch.slots[batch.slots >= 0]
    assert len(written) == 3
    expected = torch.nn.functional.layer_norm(values, (6,), norm, bias, eps)[[0, 2, 3]]
    assert torch.equal(cache.storage[written], expected)
    untouched = torch.ones(32, dtype=torch.bool)
    untouched[written] = False
    assert not cache.storage[untouched].any()
