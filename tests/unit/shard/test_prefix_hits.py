"""KV after a prefix hit: however its rows are cut into chunks, it is that of the undisturbed run."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from actors.config import GroupConfig
from tests.support.groups import group_config
from tests.support.steps import LoneShard, Rows, admission
from tests.support.tiny_models import Weights, write_tiny_model

BLOCK = 4
NUM_TOKENS = 19
PROMPT = torch.randint(3, 101, (NUM_TOKENS,), generator=torch.Generator().manual_seed(5)).tolist()
COLD_BLOCKS, SPARE_BLOCKS, NUM_BLOCKS = range(6), range(6, 12), 12


@pytest.fixture(scope="module", params=[1, 2, 3])
def config(request, tmp_path_factory) -> GroupConfig:
    path = write_tiny_model(
        tmp_path_factory.mktemp("model"), "deepseek_v3", Weights(), num_nextn_predict_layers=request.param
    )
    return group_config(
        model_path=str(path),
        max_model_len=64,
        max_num_seqs=2,
        block_size=BLOCK,
        num_kv_blocks=NUM_BLOCKS,
        num_speculative_tokens=3,
        num_mtp_modules=request.param,
    )


def chunkings(num_rows: int, num_cuts: int) -> list[list[int]]:
    """Lengths of chunks that cover num_rows, with every choice of cuts among the first num_cuts places."""
    found = []
    for chosen in itertools.product((False, True), repeat=min(num_cuts, num_rows - 1)):
        bounds = [0, *(i + 1 for i, cut in enumerate(chosen) if cut), num_rows]
        found.append([end - begin for begin, end in itertools.pairwise(bounds)])
    return found


def kv_of(shard: LoneShard, blocks: Sequence[int]) -> list[Tensor]:
    """By layer [NUM_TOKENS, C + R]: what the blocks of a prompt hold."""
    slots = torch.cat([torch.arange(b * BLOCK, (b + 1) * BLOCK) for b in blocks])[:NUM_TOKENS]
    return [vectors.gather(slots, torch.float64) for vectors in shard.shard._cache.latents]


@pytest.mark.slow
@pytest.mark.parametrize("num_hit", [4, 8, 16])
def test_every_chunking_of_a_prefix_hit_writes_the_undisturbed_kv(config: GroupConfig, num_hit: int) -> None:
    shard = LoneShard(config)
    num_modules, num_layers = config.num_mtp_modules, 4
    shard.run(Rows(slot=0, ids=PROMPT, start=0, new_blocks=tuple(COLD_BLOCKS)), admit=[admission(0)])
    cold = kv_of(shard, COLD_BLOCKS)
    drafts = shard.run(Rows(slot=0, k=3)).drafts.tolist()
    start = max(num_hit - num_modules, 0)
    num_shared = num_hit // BLOCK
    table = [*list(COLD_BLOCKS)[:num_shared], *list(SPARE_BLOCKS)[num_shared:]]
    number = 1
    for lengths in chunkings(NUM_TOKENS - start, num_modules + 3):
        for vectors in shard.shard._cache.latents:  # what is not written must show
            spare = torch.arange(SPARE_BLOCKS[0] * BLOCK, NUM_BLOCKS * BLOCK)
            vectors.write(spare, torch.full((len(spare), vectors.dim), 1e3).double())
        number += 1
        position = start
        for i, length in enumerate(lengths):
            report = shard.run(
                Rows(
                    slot=1,
                    admission=number,
                    ids=PROMPT[position : position + length],
                    start=position,
                    readonly=min(max(num_hit - position, 0), length),
                    is_final=position + length == NUM_TOKENS,
                    new_blocks=table if i == 0 else (),
                ),
                admit=[admission(1, number=number)] if i == 0 else (),
            )
            position += length
        assert len(report.tokens) == 1
        for layer, (found, expected) in enumerate(zip(kv_of(shard, table), cold, strict=True)):
            first_seen = max(layer - num_layers, -1) + 1  # module j writes nothing of use before slot 1 + j
            torch.testing.assert_close(
                found[first_seen:], expected[first_seen:], rtol=1e-9, atol=1e-9, msg=f"{layer}, {lengths}"
            )
        assert shard.run(Rows(slot=1, admission=number, k=3)).drafts.tolist() == drafts
