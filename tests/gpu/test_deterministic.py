"""--deterministic: a stream is the same bit for bit however its request is computed, in bfloat16 and fp8."""

import pytest

from actors.inline_group import InlineGroup
from actors.shard.decode_graphs import DecodeGraphs
from tests.support.groups import group_config, request, run, text_prompts

pytestmark = pytest.mark.gpu
LENGTHS = [12, 90, 200, 40, 63, 64, 65, 130]
PROMPTS = text_prompts([LENGTHS[i % 8] + i // 8 for i in range(32)])
"""Shorter and longer than the 64 tokens that the indexer selects."""
FORMATS = ["bfloat16", "fp8_ds_mla"]


def requests():
    """Log probabilities tell the logits' bits, which tokens alone would hide."""
    draws = [(0.0, 0, 1.0), (0.8, 0, 1.0), (1.0, 20, 0.9)]
    return [
        request(
            f"{i}",
            prompt,
            seed=i,
            temperature=draws[i % 3][0],
            top_k=draws[i % 3][1],
            top_p=draws[i % 3][2],
            max_tokens=24 + 3 * (i % 7),
            logprobs=2 if i % 4 == 0 else None,
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def streams(kv_cache_dtype: str, *, num_requests: int = len(PROMPTS), **settings):
    """By request: its tokens, and the log probabilities of those that ask."""
    group = InlineGroup(
        group_config(
            **{
                "device": "cuda",
                "attention_backend": "triton",
                "dtype": "bfloat16",
                "kv_cache_dtype": kv_cache_dtype,
                "deterministic": True,
                "num_speculative_tokens": 3,
                "max_num_seqs": 64,
                "max_num_batched_tokens": 4096,
            }
            | settings
        )
    )
    found = {
        name: (
            collected.token_ids,
            [repr(update.logprobs) for update in collected.updates if update.logprobs],
        )
        for name, collected in run(group, requests()[:num_requests]).items()
    }
    group.close()
    return found


@pytest.fixture(scope="module", params=FORMATS)
def one_by_one(request):
    """No drafts, one request at a time, each prompt in one chunk."""
    return request.param, streams(
        request.param, num_speculative_tokens=0, max_num_seqs=1, enable_prefix_caching=False
    )


def tokens(found):
    return {name: ids for name, (ids, _) in found.items()}


@pytest.mark.parametrize(
    "settings",
    [{"num_speculative_tokens": k, "max_num_seqs": n} for k, n in ((0, 64), (1, 4), (2, 16), (3, 1), (3, 64))]
    + [
        {"max_num_batched_tokens": 7, "max_num_seqs": 2},
        {"max_num_batched_tokens": 100},
        {"num_kv_blocks": 40, "max_num_seqs": 8},  # preempts
        {"scheduling": "deferred"},
    ],
    ids=str,
)
def test_one_stream(one_by_one, settings):
    kv_cache_dtype, expected = one_by_one
    assert tokens(streams(kv_cache_dtype, **settings)) == tokens(expected)


def test_log_probabilities(one_by_one):
    """Of a step that the same requests share otherwise: to the last bit."""
    kv_cache_dtype, expected = one_by_one
    found = streams(kv_cache_dtype, num_speculative_tokens=0)
    assert any(logprobs for _, logprobs in expected.values())
    assert found == expected


def test_a_prefix_that_is_known(one_by_one):
    kv_cache_dtype, expected = one_by_one
    group = InlineGroup(
        group_config(
            device="cuda",
            attention_backend="triton",
            dtype="bfloat16",
            kv_cache_dtype=kv_cache_dtype,
            deterministic=True,
            num_speculative_tokens=3,
        )
    )
    run(group, requests())
    again = {name: collected.token_ids for name, collected in run(group, requests()).items()}
    assert group.stats().num_cache_hits > 0
    group.close()
    assert again == tokens(expected)


def test_eager_steps(one_by_one, monkeypatch):
    kv_cache_dtype, expected = one_by_one
    monkeypatch.setattr(DecodeGraphs, "_may_capture", lambda self, shape: False)
    assert tokens(streams(kv_cache_dtype)) == tokens(expected)


def test_without_it_streams_differ():
    """Else the tests above would show nothing."""
    plain = [
        tokens(streams("bfloat16", deterministic=False, num_speculative_tokens=k, max_num_seqs=n))
        for k, n in ((0, 1), (3, 64))
    ]
    assert plain[0] != plain[1]
