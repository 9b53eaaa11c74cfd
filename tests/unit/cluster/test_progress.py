"""Progress where stderr is no terminal."""

import re
import time

import pytest

from cluster.report import progress
from cluster.report.progress import duration, progress_bar, rate_and_rest


def wait_for(capsys: pytest.CaptureFixture[str], text: str) -> str:
    told, deadline_s = "", time.monotonic() + 30
    while text not in told:
        assert time.monotonic() < deadline_s, told
        told += capsys.readouterr().err
        time.sleep(0.01)
    return told


def test_a_log_gets_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.01)
    with progress_bar("Rows", 400, in_logs=True) as bar:
        wait_for(capsys, "] Rows: 0 of 400, 0.0/s\n")  # nothing advances, and that is told too
        bar.advance(100, timed=False)
        wait_for(capsys, "] Rows: 100 of 400, 0.0/s\n")
        bar.advance(20)
        assert re.search(r"] Rows: 120 of 400, [\d.]+/s, [\d a-z]+ left\n", wait_for(capsys, " left\n"))
    with progress_bar("Rows", None, in_logs=True) as bar:
        bar.advance()
        wait_for(capsys, "] Rows: 1, ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3600, "1 h 0 min"), (190_000, "2 d 4 h")],
)
def test_a_rest_is_told_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert rate_and_rest(2.0, round(2 * seconds) or 1).endswith(" left")
    assert rate_and_rest(2.0, None) == rate_and_rest(2.0, 0) == "2.0/s"
    assert rate_and_rest(0.0, 5) == "0.0/s"


def test_nothing_is_told_to_who_did_not_ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.01)
    with progress_bar("Prompts", 3) as bar:
        bar.advance()
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
