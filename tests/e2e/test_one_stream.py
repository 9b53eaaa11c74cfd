"""One stream: the same prompt and seed give the same tokens, however the group is cut or scheduled.

In float64: summation order differs between topologies, and 1.5 % of the indexer's selections beyond
index_topk hang on a difference that float32 cannot hold. Exact ties go to the lower position everywhere.
"""

import pytest

from actors.inline_group import InlineGroup
from actors.requests import Request, SequenceKey
from kernels_integration.native.library import is_available
from tests.support.groups import group_config, request, run, text_prompts

# Shorter than, at, just beyond and far beyond index_topk = 64, so that streams cross it too.
PROMPT_LENGTHS = [5, 40, 64, 66, 130, 300]
NEW_TOKENS = 12


def _requests() -> list[Request]:
    prompts = text_prompts(PROMPT_LENGTHS)
    greedy = [request(f"greedy-{len(p)}", p, max_tokens=NEW_TOKENS) for p in prompts]
    sampled = [
        request(f"sampled-{len(p)}", p, max_tokens=NEW_TOKENS, temperature=1.0, seed=7 + i)
        for i, p in enumerate(prompts)
    ]
    filtered = [
        request("top-p", prompts[1], max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.9, seed=3),
        request("top-k", prompts[3], max_tokens=NEW_TOKENS, temperature=1.2, top_k=8, seed=4),
        request("min-p", prompts[0], max_tokens=NEW_TOKENS, temperature=1.1, min_p=0.05, seed=5),
    ]
    return greedy + sampled + filtered


@pytest.fixture(scope="module")
def streams() -> dict[str, list[int]]:
    """The plain streams: one rank, no drafts, one request at a time."""
    group = InlineGroup(group_config())
    collected = run(group, _requests(), together=False)
    group.close()
    result = {name: c.token_ids for name, c in collected.items()}
    assert all(len(ids) == NEW_TOKENS for ids in result.values())
    assert len({tuple(ids) for ids in result.values()}) == len(result), "the streams tell nothing apart"
    return result


def _check(streams: dict[str, list[int]], *, together: bool = True, **config) -> None:
    group = InlineGroup(group_config(**config))
    try:
        collected = run(group, _requests(), together=together)
    finally:
        group.close()
    differing = {
        name: (collected[name].token_ids, ids)
        for name, ids in streams.items()
        if collected[name].token_ids != ids
    }
    assert not differing


@pytest.mark.product(1)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 5, 8])
def test_any_number_of_drafts(streams, k):
    _check(streams, num_speculative_tokens=k)


@pytest.mark.product(2)
@pytest.mark.parametrize(("tp", "dcp"), [(2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("k", [0, 3])
def test_any_topology(streams, tp, dcp, k):
    _check(streams, tensor_parallel_size=tp, decode_context_parallel_size=dcp, num_speculative_tokens=k)


@pytest.mark.product(2)
@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize(("dcp", "interleaved_by"), [(1, "token"), (2, "token"), (2, "block")])
def test_any_block_size_and_interleave(streams, block_size, dcp, interleaved_by):
    _check(
        streams,
        tensor_parallel_size=dcp,
        decode_context_parallel_size=dcp,
        num_speculative_tokens=5,
        block_size=block_size,
        num_kv_blocks=8192 // block_size,
        cp_kv_cache_interleave_size=1 if interleaved_by == "token" else block_size,
    )


@pytest.mark.product(1)
@pytest.mark.parametrize("rows", [7, 33, 1024])
def test_any_chunking_of_the_prompts(streams, rows):
    _check(streams, num_speculative_tokens=2, max_num_batched_tokens=rows)


def test_alone_with_drafts(streams):
    _check(streams, together=False, num_speculative_tokens=3)


@pytest.mark.product(1)
@pytest.mark.parametrize("k", [0, 3])
def test_a_tiny_pool_preempts_and_changes_nothing(streams, k):
    config = group_config(num_speculative_tokens=k, block_size=4, num_kv_blocks=84, max_num_seqs=8)
    group = InlineGroup(config)
    collected = run(group, _requests())
    assert group.stats().num_preemptions > 0
    group.close()
    assert {name: c.token_ids for name, c in collected.items()} == streams


@pytest.mark.product(1)
@pytest.mark.parametrize("topology", [(1, 1), (4, 2)])
def test_members_join_and_leave_every_step(streams, topology):
    """Bystanders of changing length and temperature come and go around the watched requests."""
    tp, dcp = topology
    config = group_config(
        num_speculative_tokens=3,
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        max_num_batched_tokens=96,
    )
    group = InlineGroup(config)
    watched = {r.request_id: r for r in _requests()}
    waiting = list(watched.values())
    bystanders = text_prompts([3, 17, 50, 80])
    tokens: dict[str, list[int]] = {name: [] for name in watched}
    step = 0
    while group.has_work or waiting:
        if waiting and step % 2 == 0:
            group.submit(waiting.pop(0))
        prompt = bystanders[step % len(bystanders)]
        if waiting:
            group.submit(
                request(f"by-{step}", prompt, max_tokens=1 + step % 9, temperature=step % 2, seed=step)
            )
        group.abort([SequenceKey(f"by-{step - 3}")])
        for update in group.step():
            if update.request_id in tokens:
                tokens[update.request_id] += update.token_ids
        step += 1
    group.close()
    assert tokens == streams


def _float32_answers(together: bool, **config) -> dict[str, tuple[list[int], list[float]]]:
    settings = {"dtype": "float32", "kv_cache_dtype": "float32", "attention_backend": "native"}
    group = InlineGroup(group_config(**settings | config))
    asked = [
        request(f"{t}-{len(p)}", p, max_tokens=NEW_TOKENS, temperature=t, seed=9, logprobs=2)
        for p in text_prompts([5, 66, 130])
        for t in (0.0, 1.0)
    ]
    try:
        collected = run(group, asked, together=together)
    finally:
        group.close()
    return {
        name: (c.token_ids, [entry.logprob for update in c.updates for entry in update.logprobs])
        for name, c in collected.items()
    }


@pytest.mark.skipif(not is_available(), reason="no C compiler")
def test_native_float32_has_the_same_bits_in_any_batch():
    """On one rank a row's bits are its own: not even log probabilities depend on drafts, batch or chunks."""
    alone = _float32_answers(together=False)
    assert all(len(logprobs) == NEW_TOKENS for _, logprobs in alone.values())
    assert _float32_answers(together=True, num_speculative_tokens=3) == alone
    assert _float32_answers(together=True, num_speculative_tokens=1, max_num_batched_tokens=33) == alone
