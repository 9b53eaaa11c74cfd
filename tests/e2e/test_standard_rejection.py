"""--rejection-sampling standard: one stream for a given k, whatever the topology, batch and scheduling."""

import pytest

from actors.inline_group import InlineGroup
from tests.support.groups import group_config, request, run, text_prompts

NEW_TOKENS = 16
STANDARD = {"rejection_sampling": "standard"}


def _requests():
    prompts = text_prompts([5, 40, 70])
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.0, "presence_penalty": 1.0, "top_k": 50},
    ]
    sampled = [
        request(f"s{i}-{j}", prompt, seed=10 * i + j, max_tokens=NEW_TOKENS, **params)
        for i, prompt in enumerate(prompts)
        for j, params in enumerate(settings)
    ]
    greedy = [request(f"g{i}", prompt, max_tokens=NEW_TOKENS) for i, prompt in enumerate(prompts)]
    penalised = request("gp", prompts[1], max_tokens=NEW_TOKENS, repetition_penalty=1.3)
    return [*sampled, *greedy, penalised]


def _streams(*, together: bool = True, **config) -> dict[str, list[int]]:
    group = InlineGroup(group_config(**config))
    collected = run(group, _requests(), together=together)
    stats = group.stats()
    group.close()
    if config.get("num_speculative_tokens"):
        assert 0 < sum(stats.accepted) < sum(stats.proposed)
    return {name: c.token_ids for name, c in collected.items()}


@pytest.fixture(scope="module")
def streams() -> dict[str, list[int]]:
    return _streams(together=False, num_speculative_tokens=3, **STANDARD)


@pytest.mark.product(2)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"scheduling": "deferred"},
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2, "scheduling": "deferred"},
        {"max_num_batched_tokens": 64, "block_size": 4, "num_kv_blocks": 2048},
        {"max_num_batched_tokens": 7, "max_num_seqs": 1},  # steps of middle chunks alone draw nothing
        {"max_num_batched_tokens": 7, "max_num_seqs": 1, "scheduling": "deferred", "tensor_parallel_size": 2},
    ],
    ids=str,
)
def test_one_stream(streams, config):
    assert _streams(num_speculative_tokens=3, **STANDARD, **config) == streams


def test_greedy_streams_are_the_coupled_ones(streams):
    coupled = _streams(num_speculative_tokens=3)
    for name, tokens in streams.items():
        assert (tokens == coupled[name]) == name.startswith("g"), name


def test_streams_depend_on_k_and_seed(streams):
    other_k = _streams(num_speculative_tokens=1, **STANDARD)
    assert any(other_k[name] != tokens for name, tokens in streams.items())
    prompt = text_prompts([40])[0]
    group = InlineGroup(group_config(num_speculative_tokens=3, **STANDARD))
    seeds = [
        request(f"{seed}{again}", prompt, seed=seed, temperature=1.0, max_tokens=12)
        for seed in (1, 2)
        for again in "ab"
    ]
    tokens = {name: c.token_ids for name, c in run(group, seeds).items()}
    group.close()
    assert tokens["1a"] == tokens["1b"] != tokens["2a"] == tokens["2b"]


def test_without_drafts_the_draws_are_the_plain_ones():
    assert _streams(num_speculative_tokens=0, **STANDARD) == _streams(num_speculative_tokens=0)
