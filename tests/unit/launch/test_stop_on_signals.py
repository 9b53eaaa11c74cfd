"""Signals to a server: the first lets requests finish, a later one ends it; exit codes of signals."""

import contextlib
import importlib
import signal

import pytest

from cluster.cli.serve import _stop_on_signals
from cluster.launch.signals import ENDING

main_module = importlib.import_module("cluster.cli.app")  # the package gives the name to its function


def test_a_signal_that_comes_twice_at_once_is_one_and_a_later_one_ends() -> None:
    before = {number: signal.getsignal(number) for number in ENDING}
    now = [100.0]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where a shell ignores it
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


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.parametrize("swallowed_as", [AttributeError, SystemExit])
def test_a_signal_that_shows_as_another_error_is_told_as_the_signal(
    number: signal.Signals,
    code: int,
    swallowed_as: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An import or a call of Ray's that a signal interrupts may end with an error of its own."""

    def app(**_: object) -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(number)
        raise swallowed_as(1)

    monkeypatch.setattr(main_module, "app", app)
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        with pytest.raises(SystemExit) as ended:
            main_module.main([])
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == code
    assert capsys.readouterr().err == ""
