"""The choice among groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from actors.requests import Request
from actors.sampling_params import SamplingParams
from actors.stats import GroupStats
from cluster.answering.group import Groups
from cluster.answering.routing import MAX_LEAD, GroupSnapshot, SeenPrompts, beginnings_of, best_group
from tests.support.scripted_group import ScriptedGroup

SNAPSHOTS = st.builds(
    GroupSnapshot,
    healthy=st.booleans(),
    num_own=st.integers(0, 12),
    num_reported=st.integers(0, 12),
    kv_usage=st.floats(0, 1),
    overlap=st.integers(0, 3),
)


@pytest.mark.slow
@given(st.lists(SNAPSHOTS, max_size=6))
def test_the_choice_is_healthy_near_the_least_load_and_knows_most(groups: list[GroupSnapshot]) -> None:
    chosen = best_group(groups)
    healthy = [group for group in groups if group.healthy]
    if chosen is None:
        assert not healthy
        return
    mine = groups[chosen]
    assert mine.healthy
    assert all(mine.num_sequences <= group.num_sequences + MAX_LEAD for group in healthy)
    for other in healthy:
        if other.num_sequences <= mine.num_sequences:
            assert other.overlap <= mine.overlap
        if other.overlap == mine.overlap:
            assert mine.num_sequences <= other.num_sequences


def test_both_what_was_just_sent_and_what_others_sent_count() -> None:
    just_sent = GroupSnapshot(healthy=True, num_own=4, num_reported=0)
    assert best_group([just_sent, GroupSnapshot(healthy=True, num_own=0, num_reported=3)]) == 1
    assert best_group([just_sent, GroupSnapshot(healthy=True, num_own=0, num_reported=5)]) == 0


def test_of_equals_the_emptiest_cache_is_taken() -> None:
    full, empty = (GroupSnapshot(healthy=True, kv_usage=usage) for usage in (0.9, 0.1))
    assert best_group([full, empty]) == 1


def test_prompts_of_their_own_are_spread_evenly() -> None:
    counts = [0, 0, 0]
    for _ in range(30):
        chosen = best_group([GroupSnapshot(healthy=True, num_own=count) for count in counts])
        assert chosen is not None
        counts[chosen] += 1
    assert counts == [10, 10, 10]


def test_prompts_with_a_common_beginning_stay_together_until_that_costs_too_much() -> None:
    counts, seen = [0, 0], [SeenPrompts(), SeenPrompts()]
    chosen_for = []
    for number in range(2 * MAX_LEAD + 2):
        beginnings = beginnings_of([1] * 200 + [number] * 100, None)
        snapshots = [
            GroupSnapshot(healthy=True, num_own=count, overlap=its.overlap(beginnings))
            for count, its in zip(counts, seen, strict=True)
        ]
        chosen = best_group(snapshots)
        assert chosen is not None
        counts[chosen] += 1
        seen[chosen].add(beginnings)
        chosen_for.append(chosen)
    assert chosen_for[: MAX_LEAD + 1] == [0] * (MAX_LEAD + 1)
    assert chosen_for[MAX_LEAD + 1] == 1
    assert max(counts) - min(counts) <= MAX_LEAD + 1


def test_beginnings_are_shared_as_far_as_tokens_and_salt_are() -> None:
    seen = SeenPrompts()
    seen.add(beginnings_of(range(300), "one"))
    assert seen.overlap(beginnings_of(range(300), "one")) == 4
    assert seen.overlap(beginnings_of([*range(130), *range(170)], "one")) == 2
    assert seen.overlap(beginnings_of(range(300), "two")) == 0
    assert seen.overlap(beginnings_of(range(63), "one")) == 0
    seen.clear()
    assert seen.overlap(beginnings_of(range(300), "one")) == 0


def test_what_is_remembered_is_bounded_and_the_oldest_goes_first() -> None:
    seen = SeenPrompts()
    for number in range(200):
        seen.add(beginnings_of([number] * 4096, None))
    assert len(seen._seen) <= 4096
    assert seen.overlap(beginnings_of([199] * 4096, None)) == 64
    assert seen.overlap(beginnings_of([0] * 4096, None)) == 0


def test_gateways_that_like_one_group_do_not_overrun_it_between_two_heartbeats() -> None:
    """Each counts what it has sent as if the others had done the same."""
    groups = [ScriptedGroup() for _ in range(3)]
    for group in groups:
        group.stats = GroupStats(running=20, num_front_ends=5)
    gateways = [Groups(groups) for _ in range(5)]
    prompt = Request(
        request_id="r",
        prompt_token_ids=tuple(range(64)),
        params=SamplingParams(),
        seed=0,
        eos_token_ids=(),
    )
    given = [0, 0, 0]
    for number in range(30):
        gateway = gateways[number % 5]
        chosen = gateway.choose(prompt)
        gateway.took(chosen, replace(prompt, incarnation=number))
        given[groups.index(chosen)] += 1
    assert max(given) - min(given) <= 2 * MAX_LEAD + 5
