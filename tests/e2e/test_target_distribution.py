"""Sampled streams have the target's distribution: chi-square against transformers' exact probabilities.

Three drafts a step: the first token comes from the prompt's last row, the second from an anchor row, the
third mostly from the row of an accepted draft. Seeds are fixed, so the outcome is too.
"""

import collections

import pytest
import torch
from scipy import stats

from actors.inline_group import InlineGroup
from tests.support.groups import group_config, load_tokenizer, request
from tests.support.reference import filtered_probabilities, next_token_logits

NUM_STREAMS = 3000
SMALLEST_EXPECTED = 5.0

SETTINGS = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.3, "top_k": 12},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 0.9, "top_p": 0.6},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 1.1, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
}


def _prompt() -> tuple[int, ...]:
    return (0, *load_tokenizer().encode("The function returns", add_special_tokens=False).ids)


def _streams(params: dict) -> list[tuple[int, ...]]:
    config = group_config(
        dtype="float32",
        kv_cache_dtype="float32",
        num_speculative_tokens=3,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    group = InlineGroup(config)
    prompt, tokens = _prompt(), collections.defaultdict(list)
    for seed in range(NUM_STREAMS):
        group.submit(request(str(seed), prompt, seed=seed, max_tokens=3, **params))
    while group.has_work:
        for update in group.step():
            tokens[update.request_id] += update.token_ids
    assert sum(group.stats().accepted) > NUM_STREAMS / 10, "no draft was accepted"
    group.close()
    return [tuple(tokens[str(seed)]) for seed in range(NUM_STREAMS)]


def _p_value(observed: collections.Counter, expected: dict[int, float]) -> float:
    """Chi-square over outcomes, the rare ones pooled; `expected` are counts that sum to the total."""
    pooled_observed, pooled_expected = 0.0, 0.0
    cells_observed, cells_expected = [], []
    for outcome, count in expected.items():
        if count < SMALLEST_EXPECTED:
            pooled_observed += observed.get(outcome, 0)
            pooled_expected += count
        else:
            cells_observed.append(observed.get(outcome, 0))
            cells_expected.append(count)
    if pooled_expected >= SMALLEST_EXPECTED:
        cells_observed.append(pooled_observed)
        cells_expected.append(pooled_expected)
    assert sum(cells_observed) >= 0.98 * sum(observed.values()), "outcomes outside the support"
    scale = sum(cells_observed) / sum(cells_expected)
    return float(stats.chisquare(cells_observed, [c * scale for c in cells_expected]).pvalue)


@pytest.mark.parametrize("name", SETTINGS)
def test_first_second_and_third_token(name):
    params = SETTINGS[name]
    streams = _streams(params)
    prompt = _prompt()
    first = filtered_probabilities(next_token_logits([prompt]), **params)[0]
    for stream in streams:
        assert first[stream[0]] > 0, "a token that the filters exclude"
    expected = {t: NUM_STREAMS * p for t, p in enumerate(first.tolist()) if p > 0}
    assert _p_value(collections.Counter(s[0] for s in streams), expected) > 1e-3

    # Later tokens: exact given the most frequent prefixes, whose streams are many enough to count.
    for length in (1, 2):
        prefixes = collections.Counter(s[:length] for s in streams).most_common(4)
        contexts = [prompt + prefix for prefix, _ in prefixes]
        conditional = filtered_probabilities(next_token_logits(contexts), **params)
        for (prefix, count), probabilities in zip(prefixes, conditional, strict=True):
            following = collections.Counter(s[length] for s in streams if s[:length] == prefix)
            assert all(probabilities[t] > 0 for t in following)
            expected = {t: count * p for t, p in enumerate(probabilities.tolist()) if p > 0}
            if count >= 200 and sum(c >= SMALLEST_EXPECTED for c in expected.values()) > 1:
                assert _p_value(following, expected) > 1e-3


def test_the_check_notices_a_wrong_distribution():
    """Streams drawn at another temperature must fail the same test."""
    streams = _streams({"temperature": 0.75})
    wrong = filtered_probabilities(next_token_logits([_prompt()]), temperature=0.6)[0]
    expected = {t: NUM_STREAMS * p for t, p in enumerate(wrong.tolist()) if p > 0}
    assert _p_value(collections.Counter(s[0] for s in streams), expected) < 1e-6


def test_reference_filters_on_a_known_case():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert filtered_probabilities(logits, temperature=1.0, top_p=0.6)[0].tolist() == pytest.approx(
        [0.625, 0.375, 0, 0]
    )
    assert filtered_probabilities(logits, temperature=1.0, min_p=0.4)[0].tolist() == pytest.approx(
        [0.625, 0.375, 0, 0]
    )
    assert filtered_probabilities(logits, temperature=1.0, top_k=1)[0].tolist() == [1, 0, 0, 0]
