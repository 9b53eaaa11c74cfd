"""The life of a group as data: every sequence of events keeps to the allowed ways."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.coordinator.group_state import (
    NEXT_PHASES,
    Diagnosis,
    Evidence,
    GroupState,
    Phase,
    Symptom,
    back_off_s,
)

RANKS = st.integers(-1, 4)
AGES = st.integers(-1, 2)
"""How many epochs an event is late; -1: it comes from the future."""
EVENTS = st.one_of(
    st.tuples(st.just("ready"), RANKS, AGES),
    st.tuples(st.just("lost"), RANKS, AGES),
    st.tuples(st.just("failed"), RANKS, AGES),
    st.tuples(st.just("corrected"), RANKS, AGES),
    st.tuples(st.just("steady"), RANKS, AGES),
    st.tuples(st.just("stepped"), RANKS, AGES),
    st.tuples(st.just("lost and nearer to its cause"), RANKS, AGES),
    st.tuples(st.just("stopping"), RANKS, AGES),
)


def after(state: GroupState, event: tuple[str, int, int]) -> GroupState:
    kind, rank, age = event
    epoch = state.epoch - age
    if kind == "ready":
        return state.shard_ready(rank, epoch)
    if kind == "lost":
        return state.shards_lost("a shard is lost", epoch)
    if kind == "lost and nearer to its cause":
        return state.shards_lost("a shard is lost", epoch, rank, counts=False)
    if kind == "steady":
        return state.steady()
    if kind == "stepped":
        return state.stepped()
    if kind == "failed":
        return state.failed("a bug", "internal")
    if kind == "corrected":
        return state.corrected("a better account")
    return state.stopping()


@given(num_shards=st.integers(1, 4), restarts=st.integers(0, 3), events=st.lists(EVENTS, max_size=40))
def test_every_life_keeps_to_the_ways(
    num_shards: int, restarts: int, events: list[tuple[str, int, int]]
) -> None:
    state = GroupState(num_shards=num_shards, max_restarts=restarts)
    for event in events:
        before, state = state, after(state, event)
        kind, _, age = event
        if state.phase is not before.phase:
            assert state.phase in NEXT_PHASES[before.phase]
        if (kind == "ready" or "lost" in kind) and age != 0:
            assert state == before, "an event of another epoch"
        # A new epoch is a recovery, takes one restart if it counts, and begins without shards.
        assert state.epoch - before.epoch in (0, 1)
        if state.epoch > before.epoch:
            assert (state.phase, state.ready) == (Phase.RECOVERING, frozenset())
            assert state.num_restarts - before.num_restarts == (kind == "lost")
        else:
            assert state.num_restarts == (0 if kind == "steady" and state.is_serving else before.num_restarts)
        assert state.num_restarts <= restarts
        is_vain = state.epoch > before.epoch
        is_of_use = kind == "stepped" and state.is_serving
        assert state.num_in_vain == (0 if is_of_use else before.num_in_vain + is_vain)
        assert state.is_serving <= (state.ready == frozenset(range(num_shards)))
        if state.phase in (Phase.STARTING, Phase.RECOVERING):
            assert len(state.ready) < num_shards
        if state.phase in (Phase.FAILED, Phase.RECOVERING):
            assert state.cause
            assert state.cause in state.message
        assert (state.message == "ready") == state.is_serving


def serving(num_shards: int = 2, **changes: int) -> GroupState:
    state = GroupState(num_shards=num_shards, **changes)
    for rank in range(num_shards):
        assert not state.is_serving
        state = state.shard_ready(rank, 0)
    assert state.is_serving
    return state


def test_without_restarts_a_lost_shard_ends_the_group() -> None:
    state = serving().shards_lost("shard 1 is lost", 0)
    assert (state.phase, state.message, state.code) == (Phase.FAILED, "shard 1 is lost", "unavailable")
    assert state.shards_lost("another", 0) == state
    assert state.failed("a bug", "internal") == state


def test_with_restarts_it_recovers_and_serves_again() -> None:
    state = serving(max_restarts=1).shards_lost("shard 1 is lost", 0)
    assert (state.phase, state.epoch) == (Phase.RECOVERING, 1)
    assert state.message == "recovering, 0 of 2 shards are ready: shard 1 is lost"
    state = state.shard_ready(0, 1).shard_ready(1, 0)
    assert state.phase is Phase.RECOVERING
    state = state.shard_ready(1, 1)
    assert state.is_serving
    assert state.shards_lost("again", 1).phase is Phase.FAILED


def test_steady_service_gives_restarts_back() -> None:
    state = serving(max_restarts=1).shards_lost("lost", 0)
    assert state.steady() == state, "it does not serve"
    state = state.shard_ready(0, 1).shard_ready(1, 1).steady()
    assert state.shards_lost("again", 1).phase is Phase.RECOVERING


def test_the_first_restart_waits_for_nothing_and_later_ones_ever_longer() -> None:
    assert [back_off_s(n) for n in (0, 1, 2, 3, 4)] == [0, 0, 0.5, 1, 2]
    assert back_off_s(100) == 30


def test_what_keeps_a_group_from_starting_is_no_reason_to_try_again() -> None:
    assert GroupState(num_shards=1, max_restarts=5).shards_lost("no memory", 0).phase is Phase.FAILED


def test_stopping_is_the_last_phase() -> None:
    state = serving().stopping()
    for event in ("ready", "lost", "failed", "corrected", "stopping"):
        assert after(state, (event, 0, 0)) == state
    assert replace(state, cause="x").message == "the group is stopping"


SYMPTOMS = (
    Symptom(Evidence.SILENCE, 0, "silent"),
    Symptom(Evidence.PEERS, 0, "rank 1 has died"),
    Symptom(Evidence.CONNECTION, 0, "the accuser closed its connection"),
    Symptom(Evidence.CONNECTION, 1, "closed"),
    Symptom(Evidence.PROCESS, 1, "killed"),
)


@pytest.mark.parametrize("num", range(1, len(SYMPTOMS) + 1))
def test_the_cause_does_not_depend_on_the_order(num: int) -> None:
    expected = ("silent", "rank 1 has died", "rank 1 has died", "closed", "killed")[num - 1]
    for order in itertools.permutations(SYMPTOMS[:num]):
        diagnosis = Diagnosis(settle_s=0.3, clock=lambda: 5.0)
        for symptom in order:
            diagnosis.add(symptom)
        assert diagnosis.cause is not None
        assert diagnosis.cause.text == expected


def test_a_cause_settles_in_time_and_at_once_where_it_is_beyond_doubt() -> None:
    now = [10.0]
    diagnosis = Diagnosis(settle_s=0.3, clock=lambda: now[0])
    assert not diagnosis.is_open
    assert diagnosis.add(SYMPTOMS[1])
    assert diagnosis.settles_at_s == 10.3
    now[0] = 10.2
    assert diagnosis.add(SYMPTOMS[3])
    assert diagnosis.settles_at_s == 10.3, "more symptoms do not postpone it"
    assert not diagnosis.add(SYMPTOMS[0])
    assert diagnosis.add(SYMPTOMS[4])
    assert diagnosis.settles_at_s == 10.2
    diagnosis.clear()
    assert not diagnosis.is_open
