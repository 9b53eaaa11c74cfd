"""The acceptance rule against its definition."""

from hypothesis import given
from hypothesis import strategies as st

from actors.coordinator.rejection import MASKED, AcceptanceCounters, accept


def test_the_walk_stops_after_the_first_wrong_draft() -> None:
    assert accept([], [5]) == [5]
    assert accept([5, 6, 7], [5, 6, 7, 8]) == [5, 6, 7, 8]
    assert accept([5, 9, 7], [5, 6, 7, 8]) == [5, 6]
    assert accept([9, 6, 7], [5, 6, 7, 8]) == [5]
    assert accept([], []) == []


def test_masked_rows_emit_nothing() -> None:
    assert accept([5, 6], [5, 6, MASKED]) == [5, 6]
    assert accept([5, MASKED], [5, MASKED, MASKED]) == [5]
    assert accept([], [MASKED]) == []


@given(st.data(), st.integers(0, 8))
def test_emits_one_more_than_the_longest_right_prefix(data, k) -> None:
    token = st.integers(0, 1)
    drafts = data.draw(st.lists(token, min_size=k, max_size=k))
    tokens = data.draw(st.lists(token, min_size=k + 1, max_size=k + 1))
    right = max(n for n in range(k + 1) if drafts[:n] == tokens[:n])
    assert accept(drafts, tokens) == tokens[: right + 1]


def test_counters_by_position() -> None:
    counters = AcceptanceCounters(3)
    for proposed, accepted in [(3, 2), (3, 0), (1, 1), (0, 0)]:
        counters.add(proposed, accepted)
    assert counters.num_verifies == 4
    assert counters.proposed == [3, 2, 2]
    assert counters.accepted == [2, 1, 0]
