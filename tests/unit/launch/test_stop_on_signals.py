"""Signals to a server: the first lets requests finish, a later one ends it."""

import signal

import pytest

from cluster.cli.serve import _stop_on_signals
from cluster.launch.signals import ENDING


def test_a_signal_that_comes_twice_at_once_is_one_and_a_later_one_ends() -> None:
    before = {number: signal.getsignal(number) for number in ENDING}
    now = [100.0]
    try:
        stop = _stop_on_signals(lambda: now[0])
        assert not stop.is_set()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)
        now[0] += 60.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
