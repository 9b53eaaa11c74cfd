"""Sampled streams have the target's distribution: chi-square against transformers' exact probabilities.

With three drafts a step the first token comes from the prompt's last row, the second from an anchor row,
the third mostly from the row of an accepted draft. Seeds are fixed, so the outcome is too.
"""

import collections

import pytest
import torch
from msgspec.structs import replace
from scipy import stats

from actors.inline_group import InlineGroup
from tests.support.groups import EOS, group_config, load_tokenizer, request
from tests.support.reference import filtered_probabilities, next_token_logits
from tests.support.sampling_reference import probabilities

NUM_STREAMS = 3000
SMALLEST_EXPECTED = 5.0

FILTERS = {
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 1.3, "top_k": 12},
    "top-k": {"temperature": 1.0, "top_k": 5},
    "top-p": {"temperature": 0.9, "top_p": 0.6},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "filters": {"temperature": 1.1, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
}
# What is "likely" is filled in below: the tokens that are likely after the prompt.
RULES = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": "likely"},
    "allowed": {"allowed_token_ids": "likely"},
    "bad-words": {"bad_words": "likely"},
    "min-tokens": {"min_tokens": 2, "stop_token_ids": "likely"},
    "everything": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": "likely",
        "bad_words": "likely",
        "temperature": 1.2,
        "top_k": 30,
        "top_p": 0.9,
        "min_p": 0.02,
    },
}
SETTINGS = FILTERS | {name: {"temperature": 0.8} | params for name, params in RULES.items()}
WAYS = {
    "k0": {"num_speculative_tokens": 0},
    "coupled": {"num_speculative_tokens": 3},
    "standard": {"num_speculative_tokens": 3, "rejection_sampling": "standard"},
}


def _filled_in(params: dict) -> dict:
    """Rules about the tokens that are likely after the prompt, as `probabilities` takes them."""
    likely = next_token_logits([_prompt()])[0].topk(12).indices.tolist()
    values = {
        "logit_bias": {likely[0]: -2.0, likely[3]: 1.5},
        "allowed_token_ids": tuple(likely[1:10]),
        # One token, and the second after the first of what comes most often.
        "bad_words": ((likely[1],), (likely[0], _second(likely[0]))),
        "stop_token_ids": (likely[0],),
    }
    return {name: values[name] if value == "likely" else value for name, value in params.items()}


def _second(first: int) -> int:
    return int(next_token_logits([(*_prompt(), first)])[0].argmax())


def _prompt() -> tuple[int, ...]:
    return (0, *load_tokenizer().encode("The function returns", add_special_tokens=False).ids)


def _streams(params: dict, **ways) -> list[tuple[int, ...]]:
    config = group_config(
        dtype="float32", kv_cache_dtype="float32", max_num_seqs=64, max_num_batched_tokens=512, **ways
    )
    group = InlineGroup(config)
    prompt, tokens = _prompt(), collections.defaultdict(list)
    params = dict(params)
    bad_words = params.pop("bad_words", ())
    for seed in range(NUM_STREAMS):
        plain = request(str(seed), prompt, seed=seed, max_tokens=3, **params)
        group.submit(replace(plain, bad_words=bad_words))
    while group.has_work:
        for update in group.step():
            tokens[update.request_id] += update.token_ids
    if ways["num_speculative_tokens"]:
        assert sum(group.stats().accepted) > NUM_STREAMS / 20, "no draft was accepted"
        assert sum(group.stats().accepted) < sum(group.stats().proposed), "no draft was rejected"
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
    if 0 < pooled_expected < SMALLEST_EXPECTED and cells_expected:
        smallest = min(range(len(cells_expected)), key=cells_expected.__getitem__)
        cells_expected[smallest] += pooled_expected
        cells_observed[smallest] += pooled_observed
    elif pooled_expected:
        cells_observed.append(pooled_observed)
        cells_expected.append(pooled_expected)
    assert sum(cells_observed) == sum(observed.values()), "outcomes outside the support"
    scale = sum(cells_observed) / sum(cells_expected)
    return float(stats.chisquare(cells_observed, [c * scale for c in cells_expected]).pvalue)


@pytest.mark.product(2)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SETTINGS)
def test_first_second_and_third_token(name, way):
    params = _filled_in(SETTINGS[name])
    prompt = _prompt()
    streams = _streams(params, **WAYS[way])
    ends = params.get("stop_token_ids", ())
    exact = {key: value for key, value in params.items() if key != "stop_token_ids"}
    exact |= {"end_token_ids": (EOS, *ends)} if ends else {}
    first = probabilities(next_token_logits([prompt])[0], prompt, (), **exact)
    for stream in streams:
        assert first[stream[0]] > 0, "a token that the parameters exclude"
    expected = {t: NUM_STREAMS * p for t, p in enumerate(first.tolist()) if p > 0}
    assert _p_value(collections.Counter(s[0] for s in streams), expected) > 1e-3

    # Later tokens: exact given the most frequent prefixes, whose streams are many enough to count.
    for length in (1, 2):
        prefixes = collections.Counter(s[:length] for s in streams if len(s) > length).most_common(4)
        logits = next_token_logits([prompt + prefix for prefix, _ in prefixes])
        for (prefix, count), row in zip(prefixes, logits, strict=True):
            conditional = probabilities(row, prompt, prefix, **exact)
            following = collections.Counter(s[length] for s in streams if s[:length] == prefix)
            assert all(conditional[t] > 0 for t in following)
            expected = {t: count * p for t, p in enumerate(conditional.tolist()) if p > 0}
            if count >= 200 and sum(c >= SMALLEST_EXPECTED for c in expected.values()) > 1:
                assert _p_value(following, expected) > 1e-3


def test_the_check_notices_a_wrong_distribution():
    """Streams drawn at another temperature must fail the same test."""
    streams = _streams({"temperature": 0.75}, **WAYS["coupled"])
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
