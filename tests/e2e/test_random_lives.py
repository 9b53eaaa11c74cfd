"""Random lives: whatever parameters, company, scheduling and topology, each stream is the plain one.

In float64, as tests/e2e/test_one_stream.py. Plain: one rank, no drafts, sync, no cache, alone.
"""

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from actors.inline_group import InlineGroup
from actors.requests import Request, TokenLogprob
from cluster.answering.choices import choices
from tests.support.groups import EOS, Collected, group_config, load_tokenizer, request, run, text_prompts

TEXTS = text_prompts([96, 96, 96])
COMMON = [1, 7, 16, 24, 33, 64, 65, 90]
"""Lengths of the beginnings that prompts share."""
MAX_LEN = 160
STOPS = ("e", "the", ". ", "\n", "an")
FAST = (3, 6, 8, 10)
"""Seeds whose groups draft: standard, deferred on four ranks, with preemptions, and sync on four ranks."""
DIFFERENCE = 1e-6
"""Between float64 log probabilities of different summation orders, kept in float32."""


class Plain:
    """The streams that requests have alone, each computed once."""

    def __init__(self) -> None:
        config = group_config(max_model_len=MAX_LEN, enable_prefix_caching=False)
        self._group = InlineGroup(config, tokenizer=load_tokenizer())
        self._known: dict[str, Collected] = {}

    def __call__(self, req: Request) -> Collected:
        if req.request_id not in self._known:
            self._known |= run(self._group, [req])
        return self._known[req.request_id]

    def close(self) -> None:
        self._group.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    group = Plain()
    yield group
    group.close()


def _some(rng: random.Random, chance: float, **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if rng.random() < chance}


def _params(rng: random.Random, prompt: tuple[int, ...]) -> dict[str, Any]:
    max_tokens = rng.choice([1, 2, 9, 17, 30])
    stops = rng.sample(STOPS, rng.randint(1, 2))
    params = {"max_tokens": max_tokens, "temperature": rng.choice([0, 0, 0.6, 1.0, 1.4])}
    params |= _some(rng, 0.25, top_k=rng.choice([1, 8, 50]), top_p=0.85, min_p=0.05)
    params |= _some(rng, 0.3, presence_penalty=rng.choice([-0.7, 1.9]), frequency_penalty=0.8)
    params |= _some(rng, 0.3, repetition_penalty=rng.choice([0.8, 1.4]))
    params |= _some(rng, 0.25, logit_bias={EOS: rng.uniform(0, 12), 11: 4.0, prompt[-1]: -9.0})
    params |= _some(rng, 0.1, allowed_token_ids=tuple(t for t in range(6144) if t % 7))
    params |= _some(rng, 0.3, stop=tuple(stops), stop_token_ids=(rng.choice(prompt), 300))
    params |= _some(rng, 0.5, ignore_eos=False, include_stop_str_in_output=True)
    params |= _some(rng, 0.3, min_tokens=rng.randint(0, max_tokens), logprobs=rng.choice([0, 2, 5]))
    params |= _some(rng, 0.15, prompt_logprobs=rng.choice([0, 3]), n=rng.choice([2, 3]))
    return params


def _requests(rng: random.Random, name: str, num: int, plain: Plain) -> list[Request]:
    """Requests that begin alike more often than not, some under a salt, some kept from their first choice."""
    made: list[Request] = []
    for i in range(num):
        text = rng.choice(TEXTS)
        prompt = text[: rng.choice(COMMON)] + tuple(rng.choices(range(2, 6144), k=rng.choice([0, 0, 1, 5])))
        req = request(f"{name}-{i}", prompt, seed=rng.getrandbits(64), **_params(rng, prompt))
        bad_words: tuple[tuple[int, ...], ...] = ()
        if rng.random() < 0.3:
            wanted = plain(msgspec.structs.replace(req, request_id=f"{name}-{i}-wanted")).token_ids
            bad_words = (tuple(wanted[1:3]) or (5,), tuple(wanted[6:7]) or (6,), tuple(wanted[9:12]) or (7,))
        changes = {
            "bad_words": bad_words,
            "cache_salt": rng.choice([None, None, "one", "two"]),
            "priority": rng.randint(-2, 2),
        }
        for choice in choices(msgspec.structs.replace(req, **changes)):
            made.append(msgspec.structs.replace(choice, request_id=f"{req.request_id}/{choice.index}"))
    return made


def _config(rng: random.Random) -> dict[str, Any]:
    tp, dcp = rng.choice([(1, 1), (1, 1), (2, 1), (2, 2), (4, 2), (4, 4)])
    block_size = rng.choice([1, 2, 4, 8, 16])
    k = rng.choice([0, 1, 3, 5, 8])
    least = -(-(MAX_LEN - 1) // (block_size * dcp))  # the longest request just fits
    choice_of_k = rng.choice(["fixed", "table", "dynamic"])
    return {
        "max_model_len": MAX_LEN,
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
        "cp_kv_cache_interleave_size": rng.choice([d for d in (1, 2, 4, 8, 16) if block_size % d == 0]),
        "num_speculative_tokens": k,
        "dynamic_speculative_decoding": choice_of_k == "dynamic",
        "num_speculative_tokens_per_batch_size": (
            ((1, 1, k), (2, 3, 0), (4, 5, max(k - 1, 0)), (6, 99, k // 2)) if choice_of_k == "table" else ()
        ),
        "block_size": block_size,
        "num_kv_blocks": least + rng.choice([0, 1, least // 3, 4 * least]),
        "max_num_seqs": rng.choice([1, 2, 5, 16]),
        "max_num_batched_tokens": rng.choice([1, 2, 7, 23, 64, 512]),
        "long_prefill_token_threshold": rng.choice([0, 0, 3, 20]),
        "rejection_sampling": rng.choice(["coupled", "coupled", "coupled", "standard"]),
        "scheduling": rng.choice(["sync", "deferred"]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "enable_prefix_caching": rng.random() < 0.7,
        "prefix_caching_hash_algo": rng.choice(["xxhash", "sha256"]),
    }


class _ErraticClock:
    """Makes the choice of k by measured times jump about, the same way at each run."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._now = rng, 0.0

    def __call__(self) -> float:
        self._now += self._rng.choice([1e-4, 1e-3, 1e-2])
        return self._now


def _live(group: InlineGroup, requests: list[Request], rng: random.Random) -> dict[str, Collected]:
    """Submit and abort at random steps until all have ended."""
    collected = {r.request_id: Collected() for r in requests}
    waiting, num_idle, chance = list(requests), 0, rng.choice([0.1, 0.5, 1.0])
    while group.has_work or waiting:
        while waiting and (rng.random() < chance or not group.has_work):
            group.submit(waiting.pop())
        if rng.random() < 0.06:
            group.abort([rng.choice(requests).key])
        steps_before = group.stats().num_steps
        updates = group.step()
        for update in updates:
            collected[update.request_id].add(update)
        num_idle = 0 if updates or group.stats().num_steps > steps_before else num_idle + 1
        assert num_idle < 4, "no progress"
        assert group.stats().num_steps < 20_000
    return collected


def _check_stream(found: Collected, expected: Collected, name: str) -> None:
    """An aborted request's tokens are a beginning of the plain ones; the others' are all of them."""
    ids = expected.token_ids
    assert found.token_ids == (ids[: len(found.token_ids)] if found.failed else ids), name
    if found.failed is None:
        assert found.last.finish_reason == expected.last.finish_reason, name
        assert found.last.matched_stop == expected.last.matched_stop, name
    for field in ("logprobs", "prompt_logprobs"):
        entries, plain_entries = (
            [entry for update in c.updates for entry in getattr(update, field)] for c in (found, expected)
        )
        _check_logprobs(entries, plain_entries[: len(entries)], name)
        assert found.failed is not None or len(entries) == len(plain_entries), name


def _check_counts(found: Collected, name: str) -> None:
    assert found.failed is None or found.failed.code == "aborted", name
    assert (found.failed is None) == (bool(found.updates) and found.last.finish_reason is not None), name
    num_tokens = 0
    for update in found.updates:
        num_tokens += len(update.token_ids)
        assert update.num_completion_tokens == num_tokens, name
        assert 0 <= update.num_accepted_tokens <= update.num_draft_tokens, name
        assert 0 <= update.num_cached_tokens < update.num_prompt_tokens, name


def _check_logprobs(found: list[TokenLogprob], expected: list[TokenLogprob], name: str) -> None:
    for entry, other in zip(found, expected, strict=True):
        assert entry.token_id == other.token_id, name
        assert entry.logprob == pytest.approx(other.logprob, abs=DIFFERENCE), name
        assert [value for _, value in entry.top] == pytest.approx([v for _, v in other.top], abs=DIFFERENCE)


def _check_statistics(group: InlineGroup, lives: list[dict[str, Collected]]) -> None:
    """Everything that came was counted, and nothing is held."""
    stats, ended = group.stats(), [c for life in lives for c in life.values()]
    assert stats.running == stats.waiting == stats.num_used_blocks == 0
    assert stats.num_generated_tokens == sum(len(c.token_ids) for c in ended)
    assert stats.num_aborted == sum(c.failed is not None for c in ended)
    assert stats.num_finished == stats.phases.num_finished == len(ended) - stats.num_aborted
    assert sum(stats.accepted) <= sum(stats.proposed)
    assert sum(stats.proposed) >= sum(c.last.num_draft_tokens for c in ended if c.updates)
    assert stats.num_cache_hits >= sum(c.last.num_cached_tokens for c in ended if c.updates)


@pytest.mark.product(3)
@pytest.mark.parametrize(
    "seed", [s if s in FAST else pytest.param(s, marks=pytest.mark.slow) for s in range(40)]
)
def test_every_stream_is_the_plain_one(plain, seed) -> None:
    """Two waves through one group: the second finds what the first has left in the cache."""
    rng = random.Random(seed)
    config = _config(rng)
    requests = _requests(rng, f"{seed}", 8, plain)
    again = [msgspec.structs.replace(r, request_id=f"{r.request_id}-again") for r in requests]
    group = InlineGroup(group_config(**config), tokenizer=load_tokenizer(), clock=_ErraticClock(rng))
    lives = [_live(group, wave, rng) for wave in (requests, rng.sample(again, len(again)))]
    for req in requests:
        for life, name in zip(lives, (req.request_id, f"{req.request_id}-again"), strict=True):
            _check_counts(life[name], name)
            if config["rejection_sampling"] == "coupled" or req.params.temperature == 0:
                _check_stream(life[name], plain(req), name)
    _check_statistics(group, lives)
    group.close()
