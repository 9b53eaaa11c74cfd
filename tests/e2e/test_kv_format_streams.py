"""Streams over an fp8_ds_mla cache: the same everywhere, and those of exact storage where it is not close."""

import statistics

import pytest

from actors.inline_group import InlineGroup
from actors.requests import Request, TokenLogprob
from tests.support.groups import group_config, request, run, text_prompts

NEW_TOKENS = 16
FP8 = {"kv_cache_dtype": "fp8_ds_mla"}


def _requests() -> list[Request]:
    """Below, at and beyond index_topk = 64; greedy and drawn. Two share a prefix."""
    prompts = text_prompts([5, 64, 66, 130, 200])
    prompts.append(prompts[-1][:180] + prompts[0])
    greedy = [request(f"greedy-{i}", p, max_tokens=NEW_TOKENS) for i, p in enumerate(prompts)]
    return greedy + [
        request(f"sampled-{i}", p, max_tokens=NEW_TOKENS, temperature=1.0, seed=7 + i)
        for i, p in enumerate(prompts)
    ]


def _streams(*, together: bool = True, **config) -> dict[str, list[int]]:
    group = InlineGroup(group_config(**config))
    try:
        collected = run(group, _requests(), together=together)
    finally:
        group.close()
    return {name: c.token_ids for name, c in collected.items()}


@pytest.fixture(scope="module")
def streams() -> dict[str, list[int]]:
    """One rank, no drafts, no shared prefixes, one request at a time."""
    found = _streams(together=False, enable_prefix_caching=False, **FP8)
    assert found != _streams(enable_prefix_caching=False), "stored without loss: the tests tell nothing apart"
    return found


@pytest.mark.product(2)
@pytest.mark.parametrize(
    ("tp", "dcp", "k"),
    [
        (1, 1, 0),
        (1, 1, 1),
        (1, 1, 3),
        (1, 1, 8),
        (2, 1, 0),
        (2, 1, 3),
        (2, 2, 0),
        (2, 2, 3),
        (4, 2, 0),
        (4, 2, 3),
    ],
)
def test_any_drafts_and_topology(streams, tp, dcp, k) -> None:
    topology = {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp}
    assert _streams(num_speculative_tokens=k, **topology, **FP8) == streams


@pytest.mark.product(1)
@pytest.mark.parametrize("rows", [9, 33, 1024])
def test_any_chunking(streams, rows) -> None:
    assert _streams(max_num_batched_tokens=rows, num_speculative_tokens=2, **FP8) == streams


@pytest.mark.product(1)
@pytest.mark.parametrize("dcp", [1, 2])
def test_deferred_over_shared_prefixes_in_small_blocks(streams, dcp) -> None:
    config = {
        "scheduling": "deferred",
        "num_speculative_tokens": 3,
        "block_size": 4,
        "num_kv_blocks": 2048,
        "tensor_parallel_size": dcp,
        "decode_context_parallel_size": dcp,
    }
    group = InlineGroup(group_config(**config, **FP8))
    again = [run(group, _requests(), together=together) for together in (False, True)]
    group.close()
    assert any(c.last.num_cached_tokens > 0 for c in again[0].values())
    for collected in again:
        assert {name: c.token_ids for name, c in collected.items()} == streams


def test_a_tiny_pool_preempts_and_changes_nothing(streams) -> None:
    config = group_config(
        num_speculative_tokens=3, block_size=2, num_kv_blocks=76, enable_prefix_caching=False, **FP8
    )
    group = InlineGroup(config)
    requests = [r for r in _requests() if len(r.prompt_token_ids) <= 130]
    collected = run(group, requests)
    assert group.stats().num_preemptions > 0
    group.close()
    assert {name: c.token_ids for name, c in collected.items()} == {
        r.request_id: streams[r.request_id] for r in requests
    }


@pytest.mark.parametrize(
    "formats",
    [
        {"kv_cache_dtype": "fp8_ds_mla", "indexer_kv_dtype": "float64"},
        {"kv_cache_dtype": "float64", "indexer_kv_dtype": "fp8"},
    ],
    ids=["fp8 latents", "fp8 keys"],
)
def test_each_format_without_the_other(formats) -> None:
    plain = _streams(together=False, enable_prefix_caching=False, **formats)
    assert _streams(num_speculative_tokens=3, tensor_parallel_size=2, **formats) == plain


def test_greedy_tokens_differ_mostly_where_two_are_nearly_tied() -> None:
    """Over the same tokens (prompts), so that a difference cannot carry on; nats. Measured: 2.2 % of 2392
    tokens differ, 52 of these 53 where the best leads by less than 0.4 (all: median 1.4), one at 1.25.
    """
    prompts = text_prompts([300] * 4)
    found: dict[str, list[TokenLogprob]] = {}
    for kv_cache_dtype in ("float32", "fp8_ds_mla"):
        group = InlineGroup(group_config(dtype="float32", kv_cache_dtype=kv_cache_dtype))
        requests = [request(str(i), p, max_tokens=1, prompt_logprobs=2) for i, p in enumerate(prompts)]
        collected = run(group, requests)
        group.close()
        found[kv_cache_dtype] = [at for i in range(4) for at in collected[str(i)].updates[0].prompt_logprobs]
    exact, stored = found.values()
    leads = [a.top[0][1] - a.top[1][1] for a in exact]
    differing = sorted(
        lead for a, b, lead in zip(exact, stored, leads, strict=True) if a.top[0][0] != b.top[0][0]
    )
    assert len(exact) == 4 * 299
    assert 0 < len(differing) / len(exact) < 0.05
    assert differing[int(0.9 * len(differing))] < 0.5 < statistics.median(leads)
    losses = [-statistics.mean(at.logprob for at in each) for each in (exact, stored)]
    assert abs(losses[0] - losses[1]) < 0.01
