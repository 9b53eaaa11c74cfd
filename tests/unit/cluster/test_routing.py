"""The choice among groups."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.answering.routing import GroupSnapshot, least_loaded

SNAPSHOTS = st.builds(
    GroupSnapshot,
    healthy=st.booleans(),
    num_own=st.integers(0, 5),
    num_reported=st.integers(0, 5),
    kv_usage=st.floats(0, 1),
)


@given(st.lists(SNAPSHOTS, max_size=6))
def test_the_choice_is_healthy_and_nobody_healthy_has_less(groups: list[GroupSnapshot]) -> None:
    chosen = least_loaded(groups)
    if chosen is None:
        assert not any(group.healthy for group in groups)
        return
    assert groups[chosen].healthy
    assert all(groups[chosen].num_sequences <= group.num_sequences for group in groups if group.healthy)


def test_both_what_was_just_sent_and_what_others_sent_count() -> None:
    just_sent = GroupSnapshot(healthy=True, num_own=4, num_reported=0)
    of_others = GroupSnapshot(healthy=True, num_own=0, num_reported=3)
    assert least_loaded([just_sent, of_others]) == 1
    assert least_loaded([just_sent, GroupSnapshot(healthy=True, num_own=0, num_reported=5)]) == 0


def test_of_equals_the_emptiest_cache_is_taken() -> None:
    full, empty = (GroupSnapshot(healthy=True, kv_usage=usage) for usage in (0.9, 0.1))
    assert least_loaded([full, empty]) == 1


def test_sequences_one_after_the_other_are_spread_evenly() -> None:
    counts = [0, 0, 0]
    for _ in range(30):
        chosen = least_loaded([GroupSnapshot(healthy=True, num_own=count) for count in counts])
        assert chosen is not None
        counts[chosen] += 1
    assert counts == [10, 10, 10]
