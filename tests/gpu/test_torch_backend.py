"""The torch backend computes on a GPU what it computes on the CPU."""

import pytest
import torch

from tests.support.model_ranks import Rank
from tests.support.model_rows import Chunk
from tests.support.random_checkpoint import write_random_checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_cache_dtype", [None, "fp8_ds_mla"])
def test_a_forward_pass(tmp_path, device, kv_cache_dtype):
    """Prefill past index_topk, verify rows, decode, MTP; in float64, where no selection nearly ties."""
    path = write_random_checkpoint(tmp_path)
    ids = torch.randint(3, 101, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    results = []
    for where in (None, device):
        rank = Rank(
            path,
            torch.float64,
            num_requests=2,
            capacity=120,
            num_mtp_layers=1,
            kv_cache_dtype=kv_cache_dtype,
            device=where,
        )
        first = rank.forward([Chunk(0, 0, 90), Chunk(1, 0, 20)], ids[:90] + ids[:20])
        states = [first, rank.forward([Chunk(0, 90, 4), Chunk(1, 20, 1)], ids[90:94] + ids[20:21])]
        states.append(rank.mtp_forward([Chunk(0, 1, 89)], ids[1:90], first[:89]))
        logits = rank.model.logits(torch.cat(states))
        assert logits.device.type == torch.device(where or "cpu").type
        results.append(logits.cpu())
    cpu, gpu = results
    # fp8 scales are float32: a value on the edge between two fp8 numbers may fall to either side.
    assert (cpu - gpu).abs().max() < (1e-9 if kv_cache_dtype is None else 1e-4)
