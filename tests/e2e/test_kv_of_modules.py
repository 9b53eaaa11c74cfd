"""Several MTP modules: what random lives leave in the prefix cache is the KV of an undisturbed prefill.

The streams do not tell: a wrong entry of a module makes a draft worse, and no token wrong.
"""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors import inline_group
from actors.inline_group import InlineGroup
from actors.requests import Request
from actors.shard.build import build_shard
from tests.support.groups import Collected, group_config, request, run
from tests.support.tiny_models import Weights, write_tiny_model

NUM_LAYERS = 4
"""Of the target; module j's own is layer NUM_LAYERS + j."""
BLOCK = 4
MAX_LEN = 96


class Watched:
    """A group of one rank whose published blocks can be read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fixed_shapes: bool, **settings: Any) -> None:
        shards: list[Any] = []

        def recorded(*args: Any, **kwargs: Any) -> Any:
            shards.append(build_shard(*args, **kwargs, fixed_shapes=fixed_shapes))
            return shards[0]

        monkeypatch.setattr(inline_group, "build_shard", recorded)
        self.group = InlineGroup(group_config(block_size=BLOCK, max_model_len=MAX_LEN, **settings))
        [shard] = shards
        self._cache = shard._modules._cache if fixed_shapes else shard._cache
        self._blocks = self.group._coordinator._blocks

    def published(self) -> dict[bytes, int]:
        """Block by hash, in the order of publication; complete."""
        # A shard fills the modules' slots behind its report, but before its next step.
        run(self.group, [request("behind", [3], max_tokens=2)])
        return dict(self._blocks._block_of)

    def forget(self) -> None:
        self._blocks.forget_published()

    def vectors(self, block: int) -> list[tuple[int, Tensor]]:
        """Latents and indexer keys [BLOCK, dim] of each layer, with the first position that anybody sees."""
        slots = torch.arange(block * BLOCK, (block + 1) * BLOCK)
        return [
            (max(layer - NUM_LAYERS + 1, 0), held.gather(slots, torch.float64))
            for kind in (self._cache.latents, self._cache.keys)
            for layer, held in enumerate(kind)
            if held.num_slots
        ]


def _live(group: InlineGroup, requests: Sequence[Request], rng: random.Random) -> dict[str, Collected]:
    """Requests come, and some are aborted, at random steps."""
    found = {r.request_id: Collected() for r in requests}
    waiting = list(requests)
    while group.has_work or waiting:
        while waiting and (rng.random() < 0.4 or not group.has_work):
            group.submit(waiting.pop())
        if rng.random() < 0.02:
            group.abort([rng.choice(requests).key])
        for update in group.step():
            found[update.request_id].add(update)
    return found


def _prompts(rng: random.Random) -> list[tuple[int, ...]]:
    """That begin alike for any number of tokens."""
    text = tuple(rng.choices(range(3, 101), k=60))
    lengths = [rng.randint(1, 60) for _ in range(14)]
    return [text[:length] + tuple(rng.choices(range(3, 101), k=rng.choice([0, 1, 7]))) for length in lengths]


@pytest.mark.slow
@pytest.mark.product(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scheduling", ["sync", "deferred"])
@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("num_modules", [2, 3])
def test_published_blocks_are_those_of_undisturbed_prefills(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_modules: int,
    fixed_shapes: bool,
    scheduling: str,
    seed: int,
) -> None:
    rng = random.Random(f"{num_modules} {fixed_shapes} {scheduling} {seed}")
    weights = Weights(residual_scale=0.15, mtp_align=0.8)
    settings: dict[str, Any] = {
        "model_path": str(
            write_tiny_model(tmp_path, "deepseek_v32", weights, num_nextn_predict_layers=num_modules)
        ),
        "num_mtp_modules": num_modules,
        "num_speculative_tokens": 3,
    }
    lived = Watched(
        monkeypatch,
        fixed_shapes=fixed_shapes,
        scheduling=scheduling,
        max_num_batched_tokens=rng.choice([1, 2, 3, 5, 9]),
        num_kv_blocks=rng.choice([40, 300]),
        max_num_seqs=rng.choice([2, 8]),
        num_speculative_tokens_per_batch_size=rng.choice([(), ((1, 1, 3), (2, 3, 0), (4, 99, 2))]),
        **settings,
    )
    undisturbed = Watched(monkeypatch, fixed_shapes=False, **settings)
    streams: list[tuple[int, ...]] = []
    for wave in range(2):
        prompts = {f"{wave}-{i}": prompt for i, prompt in enumerate(_prompts(rng) if wave == 0 else streams)}
        requests = [
            request(
                name, prompt[:70], max_tokens=rng.randint(1, 20), seed=rng.getrandbits(32), temperature=0.7
            )
            for name, prompt in prompts.items()
        ]
        found = _live(lived.group, requests, rng)
        streams = [prompts[name][:70] + tuple(found[name].token_ids) for name in prompts]
    published, compared = lived.published(), set()
    for i, stream in enumerate(streams):
        run(undisturbed.group, [request(f"alone-{i}", stream, max_tokens=1)])
        for index, (block_hash, block) in enumerate(undisturbed.published().items()):
            if block_hash not in published:
                continue
            compared.add(block_hash)
            pairs = zip(lived.vectors(published[block_hash]), undisturbed.vectors(block), strict=True)
            for which, ((first, one), (_, other)) in enumerate(pairs):
                seen = max(first - index * BLOCK, 0)
                torch.testing.assert_close(
                    one[seen:], other[seen:], rtol=1e-9, atol=1e-9, msg=f"{which=} {index=} {stream=}"
                )
        undisturbed.forget()
    lived.group.close()
    undisturbed.group.close()
    assert len(compared) > 10
