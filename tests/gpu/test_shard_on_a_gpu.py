"""Both kinds of shard on a GPU, by the torch backend: the streams of the CPU."""

import functools
from typing import Any

import pytest

from actors import inline_group
from actors.inline_group import InlineGroup
from actors.shard.build import build_shard
from tests.support.groups import group_config, request, run, text_prompts

pytestmark = pytest.mark.gpu


def _streams(**settings: Any) -> dict[str, list[int]]:
    group = InlineGroup(group_config(attention_backend="torch", max_num_batched_tokens=48, **settings))
    prompts = text_prompts([5, 40, 66, 130])
    requests = [request(f"greedy-{n}", p, max_tokens=16) for n, p in enumerate(prompts)]
    requests += [
        request(f"sampled-{n}", p, max_tokens=16, temperature=0.9, seed=n, top_p=0.9, top_k=50)
        for n, p in enumerate(prompts)
    ]
    requests.append(request("rules", prompts[1], max_tokens=16, frequency_penalty=0.8, logprobs=2))
    found = {name: c.token_ids for name, c in run(group, requests).items()}
    group.close()
    assert all(len(ids) == 16 for ids in found.values())
    return found


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("k", [0, 3])
def test_streams_are_those_of_the_cpu(fixed_shapes, k, monkeypatch) -> None:
    expected = _streams(num_speculative_tokens=k)
    monkeypatch.setattr(
        inline_group, "build_shard", functools.partial(build_shard, fixed_shapes=fixed_shapes)
    )
    assert _streams(num_speculative_tokens=k, device="cuda") == expected


def test_standard_rejection_goes_on_in_ragged_steps() -> None:
    settings = {"num_speculative_tokens": 3, "rejection_sampling": "standard"}
    assert _streams(**settings, device="cuda") == _streams(**settings)
