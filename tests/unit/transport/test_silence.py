"""Silence as a listener counts it that may have been away itself."""

from hypothesis import given
from hypothesis import strategies as st

from actors.transport.silence import SilenceWatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_listener_that_listens_counts_all_of_it() -> None:
    clock = Clock()
    watch: SilenceWatch[str] = SilenceWatch(0.5, clock)
    watch.heard("a")
    for _ in range(8):
        clock.now += 0.5
        watch.tick()
        if clock.now < 102:
            watch.heard("b")
    assert watch.silence_s("a") == 4.0
    assert watch.silence_s("b") == 2.5
    assert watch.silent(3.0) == ["a"]
    watch.heard("a")
    assert watch.silent(3.0) == []
    watch.forget("b")
    assert ("a" in watch, "b" in watch, watch.peers()) == (True, False, ["a"])


@given(
    away_s=st.floats(1.0, 1e6),
    before_s=st.floats(0, 1.5),
    looks=st.booleans(),
)
def test_time_away_is_nobodys_silence(away_s: float, before_s: float, looks: bool) -> None:
    """Whether it looks before its tick or after, and however long it was away."""
    clock = Clock()
    watch: SilenceWatch[str] = SilenceWatch(0.5, clock)
    watch.heard("a")
    clock.now += before_s
    watch.tick()
    clock.now += away_s
    if looks:
        assert watch.silent(3.0) == []
    watch.tick()
    assert watch.silent(3.0) == []


def test_a_listener_that_is_always_late_still_finds_the_dead() -> None:
    clock = Clock()
    watch: SilenceWatch[str] = SilenceWatch(0.5, clock)
    watch.heard("a")
    for _ in range(4):
        clock.now += 30
        watch.tick()
    assert watch.silent(3.0) == ["a"]
