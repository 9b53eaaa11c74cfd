"""Pools so small that requests push each other out at every point of their lives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.requests import SequenceKey
from tests.support.fake_group import Group, group_config, request
from tests.support.fake_shard import anti_oracle, stream


def run_in_pool(num_blocks: int, prompts, max_tokens: int, **config) -> Group:
    group = Group(group_config(num_kv_blocks=num_blocks, **config))
    for i, prompt in enumerate(prompts):
        group.coordinator.submit(request(f"r{i}", prompt, max_tokens=max_tokens))
    group.run()
    group.check_blocks()
    for i, prompt in enumerate(prompts):
        assert group.tokens(f"r{i}") == stream(prompt, 5, max_tokens)
        assert group.updates_of(f"r{i}")[-1].finish_reason == "length"
        # Nothing that was already streamed is sent twice.
        assert group.updates_of(f"r{i}")[-1].num_completion_tokens == max_tokens
    return group


@given(
    prompts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=20), min_size=2, max_size=5),
    max_tokens=st.integers(2, 30),
    spare=st.integers(0, 6),
    block_size=st.sampled_from([1, 2, 3, 8]),
    k=st.integers(0, 8),
    budget=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_streams_survive_any_preemption(prompts, max_tokens, spare, block_size, k, budget) -> None:
    longest = max(map(len, prompts)) + max_tokens - 1
    run_in_pool(
        -(-longest // block_size) + spare,
        prompts,
        max_tokens,
        block_size=block_size,
        num_speculative_tokens=k,
        max_num_batched_tokens=budget,
    )


@pytest.mark.parametrize("num_blocks", range(31, 63, 3))
def test_two_requests_push_each_other_out(num_blocks) -> None:
    """Each needs 31 of the blocks alone: the younger is preempted at a different point in every pool."""
    group = run_in_pool(num_blocks, [[1, 2], [3, 4]], 30, block_size=1, num_speculative_tokens=0)
    stats = group.coordinator.stats()
    assert stats.num_preemptions > 0
    assert stats.num_generated_tokens == 60
    assert stats.num_prompt_tokens == 4


@pytest.mark.parametrize("is_caching", [False, True])
def test_the_youngest_is_preempted_and_comes_back_as_chunks(is_caching) -> None:
    group = Group(
        group_config(
            block_size=1, num_kv_blocks=12, num_speculative_tokens=0, enable_prefix_caching=is_caching
        )
    )
    for i in range(2):
        group.coordinator.submit(request(f"r{i}", [i, 7], max_tokens=8))
    while group.coordinator.stats().num_preemptions == 0:
        assert group.send()
        group.report()
    state = group.coordinator._live[SequenceKey("r1")]
    committed = list(state.tokens)
    assert state in group.coordinator._scheduler.waiting
    group.run()
    readmission = next(m for m in group.sent if any(a.admission == 3 for a in m.admit))
    if is_caching:  # what nobody has written over is not computed again, but for its last row
        assert 1 < len(readmission.ids) < len(committed)
        assert readmission.ids.tolist() == committed[-len(readmission.ids) :]
        assert readmission.readonly.tolist() == [1]
        assert group.updates_of("r1")[-1].num_cached_tokens == 0  # of the prompt, when it first came
    else:
        assert readmission.ids.tolist() == committed
    assert [a.prompt_len for a in readmission.admit] == [2]
    assert group.tokens("r1") == stream([1, 7], 5, 8)


def test_a_step_that_preempts_does_not_admit() -> None:
    """The victim held blocks for drafts too: what it frees would let it straight back in."""
    wanted = {"r0": 0, "r1": 8}
    group = Group(
        group_config(block_size=1, num_kv_blocks=28, num_speculative_tokens=8),
        draft=anti_oracle,
        draft_policy=lambda state: wanted[state.request.request_id],
    )
    for i in range(2):
        group.coordinator.submit(request(f"r{i}", [i, 7], max_tokens=25))
    while group.coordinator.stats().num_preemptions == 0:
        assert group.send()
        group.report()
    assert group.sent[-1].admit == ()
    assert group.coordinator._blocks.num_free > len(group.coordinator._live[SequenceKey("r1")].tokens)
    group.run()
    assert group.tokens("r1") == stream([1, 7], 5, 25)


def test_drafts_preempt_nobody() -> None:
    """Eight drafts want nine blocks, of which two requests find fewer and fewer: k shrinks, nobody leaves."""
    group = run_in_pool(32, [[1, 2], [3, 4]], 15, block_size=1, num_speculative_tokens=8)
    assert group.coordinator.stats().num_preemptions == 0
    assert any(0 < k < 8 for m in group.sent for k in m.k.tolist())


def test_a_request_that_fits_alone_always_completes() -> None:
    """One row a step, and a pool that holds a single request."""
    run_in_pool(10, [[1] * 5, [2] * 5, [3] * 5], 6, block_size=1, max_num_batched_tokens=1)
