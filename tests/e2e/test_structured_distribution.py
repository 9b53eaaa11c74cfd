"""Constrained streams are drawn from the model's own distribution, given that every token is legal.

The exact probability of every way to write a text: a product of transformers' probabilities over the tokens
that are legal at each place, which are found by comparing bytes.
"""

import collections
from typing import Any

import pytest
import torch
from scipy import stats

from actors.inline_group import InlineGroup
from actors.token_text import bytes_of, decoder_kinds
from tests.support.groups import EOS, group_config, load_tokenizer, request, run
from tests.support.reference import next_token_logits

pytest.importorskip("xgrammar")

CHOICES = [b"the", b"that", b"a", b"an int", b"12"]
TEMPERATURE = 1.5
NUM_STREAMS = 1000
SMALLEST_EXPECTED = 5.0
WAYS: dict[str, dict[str, Any]] = {
    "k0": {"num_speculative_tokens": 0},
    "coupled": {"num_speculative_tokens": 3},
    "standard": {"num_speculative_tokens": 3, "rejection_sampling": "standard"},
}


def _prompt() -> tuple[int, ...]:
    return (0, *load_tokenizer().encode("The function returns ", add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def probability() -> dict[tuple[int, ...], float]:
    """Of each stream."""
    tokenizer = load_tokenizer()
    kinds = decoder_kinds(tokenizer)
    texts = [bytes_of(tokenizer, kinds, i) for i in range(tokenizer.get_vocab_size())]
    found: dict[tuple[int, ...], float] = {}
    pending: list[tuple[tuple[int, ...], bytes, float]] = [((), b"", 1.0)]
    while pending:
        tokens, so_far, mass = pending.pop()
        legal = [i for i, t in enumerate(texts) if t and any(c.startswith(so_far + t) for c in CHOICES)]
        if so_far in CHOICES:
            legal.append(EOS)
        logits = next_token_logits([(*_prompt(), *tokens)])[0][legal]
        for token, p in zip(legal, torch.softmax(logits / TEMPERATURE, 0).tolist(), strict=True):
            if token == EOS:
                found[*tokens, EOS] = mass * p
            else:
                pending.append(((*tokens, token), so_far + texts[token], mass * p))
    assert abs(sum(found.values()) - 1) < 1e-9
    return found


@pytest.mark.product(1)
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_streams_have_their_exact_probabilities(probability: dict[tuple[int, ...], float], way: str) -> None:
    config = group_config(
        dtype="float32", kv_cache_dtype="float32", max_num_seqs=64, max_num_batched_tokens=512, **WAYS[way]
    )
    group = InlineGroup(config)
    constraint = {"choice": [choice.decode() for choice in CHOICES]}
    asked = [
        request(
            str(seed),
            _prompt(),
            seed=seed,
            temperature=TEMPERATURE,
            max_tokens=16,
            ignore_eos=False,
            structured_outputs=constraint,
        )
        for seed in range(NUM_STREAMS)
    ]
    observed = collections.Counter(tuple(c.token_ids) for c in run(group, asked).values())
    counters = group.stats()
    group.close()
    assert observed.keys() <= probability.keys()
    if WAYS[way]["num_speculative_tokens"]:
        assert 0 < sum(counters.accepted) < sum(counters.proposed)
    often = [path for path, p in probability.items() if NUM_STREAMS * p >= SMALLEST_EXPECTED]
    assert len(often) >= 5
    cells = [(observed[path], NUM_STREAMS * probability[path]) for path in often]
    rest = (NUM_STREAMS - sum(n for n, _ in cells), NUM_STREAMS - sum(expected for _, expected in cells))
    cells += [rest] if rest[1] >= SMALLEST_EXPECTED else []
    counts, expected = zip(*cells, strict=True)
    scale = sum(counts) / sum(expected)
    assert stats.chisquare(counts, [e * scale for e in expected]).pvalue > 1e-3
