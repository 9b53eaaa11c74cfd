"""Progress where stderr is no terminal."""

import time

import pytest

from cluster.report import progress
from cluster.report.progress import progress_bar


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
        wait_for(capsys, "] Rows: 0 of 400\n")  # nothing advances, and that is told too
        bar.advance(120)
        wait_for(capsys, "] Rows: 120 of 400\n")
    with progress_bar("Rows", None, in_logs=True) as bar:
        bar.advance()
        wait_for(capsys, "] Rows: 1\n")


def test_nothing_is_told_to_who_did_not_ask(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LOG_INTERVAL_S", 0.01)
    with progress_bar("Prompts", 3) as bar:
        bar.advance()
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
