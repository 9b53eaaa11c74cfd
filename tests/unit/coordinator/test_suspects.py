"""The search for a request that kills the shards."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.coordinator.suspects import Suspects
from actors.requests import SequenceKey


def keys(num: int) -> list[SequenceKey]:
    return [SequenceKey(str(i)) for i in range(num)]


@given(num=st.integers(1, 64), data=st.data())
def test_every_poison_is_found_in_few_losses_and_nobody_else_is_blamed(num: int, data: st.DataObject) -> None:
    poison = data.draw(st.sets(st.sampled_from(keys(num)), min_size=1, max_size=3))
    suspects, live, found, num_losses = Suspects(), keys(num), set(), 0
    while poison & set(live):
        running = [key for key in live if not suspects.waits(key)]
        assert running, "somebody always runs"
        if poison & set(running):
            num_losses += 1
            guilty, _ = suspects.lost(running)
            if guilty is not None:
                found.add(guilty)
                live.remove(guilty)
        else:
            for key in running:
                suspects.got_token(key)
                suspects.got_token(key)
    assert found == poison
    assert num_losses <= len(poison) * (3 + math.ceil(math.log2(num)))
    while suspects:
        for key in [key for key in live if not suspects.waits(key)]:
            through(suspects, key)
    assert not any(map(suspects.waits, live))


def test_losses_with_progress_between_blame_nobody() -> None:
    suspects = Suspects()
    for _ in range(10):
        assert suspects.lost(keys(3)) == (None, False)
        for key in keys(3):
            suspects.got_token(key)
            suspects.got_token(key)
        assert not suspects


def test_one_token_clears_nobody_since_its_step_may_not_have_ended() -> None:
    suspects = Suspects()
    suspects.lost(keys(2))
    assert not suspects.got_token(keys(2)[0])
    suspects.lost(keys(2))
    assert [suspects.waits(key) for key in keys(2)] == [False, True]


def through(suspects: Suspects, key: SequenceKey) -> bool:
    """It gets as many tokens as clear it."""
    return suspects.got_token(key) or suspects.got_token(key)


@pytest.mark.parametrize("end", [Suspects.clear, through])
def test_the_rest_runs_when_the_half_on_trial_is_through(
    end: Callable[[Suspects, SequenceKey], bool],
) -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.lost(keys(3))
    assert [suspects.waits(key) for key in keys(3)] == [False, False, True]
    first, second, third = keys(3)
    assert not end(suspects, first)
    assert end(suspects, second)
    assert not any(map(suspects.waits, keys(3))), "who is cleared runs on"
    assert suspects.lost(keys(3)) == (third, True)
    assert not suspects.waits(SequenceKey("new"))


def test_a_loss_counts_as_nearer_only_where_the_circle_shrinks() -> None:
    suspects = Suspects()
    assert suspects.lost(keys(4)) == (None, False)
    assert suspects.lost(keys(4)) == (None, False)
    assert suspects.lost(keys(2)) == (None, True)
    assert suspects.lost(keys(1)) == (keys(1)[0], True)
    assert suspects, "the others are not cleared yet"


def test_who_comes_during_a_trial_waits() -> None:
    suspects = Suspects()
    suspects.lost(keys(2))
    late = SequenceKey("late")
    assert not suspects.waits(late)
    suspects.lost(keys(2))
    assert suspects.waits(late)
    for key in keys(2):
        through(suspects, key)
    assert not suspects.waits(late)
