"""Log files that outlive their process, what they hold, and how one terminal shows them."""

import io
import json
import os
import stat
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from actors.log_lines import JsonLines, TextLines
from actors.logs import KEPT_DAYS, LogSettings, check_writable, default_parent, new_run, remove_old_runs
from actors.stats import GroupStats
from cluster.answering.group import Groups
from cluster.cli.log_follower import LogFollower
from cluster.gateway.metrics import GatewayMetrics
from cluster.gateway.request_record import RequestRecord
from cluster.gateway.stats_log import stats_line
from kernels_integration.errors import ConfigError

PRELUDE = """
import asyncio, faulthandler, logging, sys, threading
from actors.logs import LogSettings, start_logging
parent, level, log_format = sys.argv[1:]
start_logging(LogSettings(run="20261130-120000-7", parent=parent, level=level, format=log_format), "shard 0")
"""


def run_process(parent: Path, program: str, level: str = "info", log_format: str = "text") -> tuple[str, str]:
    """What a process of ours leaves in its log file, and what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + program, str(parent), level, log_format],
        capture_output=True,
        text=True,
        timeout=60,
    )
    file = parent / "20261130-120000-7" / "shard-0.log"
    return file.read_text() if file.exists() else "", done.stderr


def test_the_level_holds_for_our_own_loggers_and_libraries_start_at_warning(tmp_path: Path) -> None:
    program = "for name in ('actors.x', 'cluster.y', 'latentray.access', 'library'):\n"
    program += "    for level in (10, 20, 30): logging.getLogger(name).log(level, f'{name} {level}')"
    log, _ = run_process(tmp_path, program)
    assert [line.split(": ", 1)[1] for line in log.splitlines()] == [
        f"{name} {level}"
        for name in ("actors.x", "cluster.y", "latentray.access", "library")
        for level in (20, 30)
        if name != "library" or level == 30
    ]
    assert " INFO shard 0: actors.x 20\n" in log


def test_json_is_one_object_a_line_whatever_is_logged(tmp_path: Path) -> None:
    program = """
logger = logging.getLogger("latentray.access")
logger.info("two\\nlines of %s \\udc80 \\u00e4", "words", extra={"facts": {"id": 'a"b\\n', "total_s": 0.25}})
logger.warning("a fact of a reserved name", extra={"facts": {"level": "high", "path": threading}})
try: 1 / 0
except ZeroDivisionError: logger.exception("division")
"""
    log, _ = run_process(tmp_path, program, log_format="json")
    first, second, third = (json.loads(line) for line in log.splitlines())
    assert list(first) == ["time", "level", "process", "logger", "message", "id", "total_s"]
    assert datetime.fromisoformat(first["time"]).utcoffset() == timedelta(0)
    assert first["message"] == "two\nlines of words \udc80 \u00e4"
    assert (first["level"], first["process"], first["logger"]) == ("info", "shard 0", "latentray.access")
    assert (first["id"], first["total_s"]) == ('a"b\n', 0.25)
    assert second["level"] == "warning"
    assert "ZeroDivisionError" in third["exception"]


def test_a_request_tells_the_same_facts_in_words_and_in_json(caplog: pytest.LogCaptureFixture) -> None:
    metrics = GatewayMetrics(Groups([]), "model", 64)
    with caplog.at_level("INFO", logger="latentray.access"):
        RequestRecord('r "7"\n', metrics).ended("invalid_request", "top_p")
    [record] = caplog.records
    facts = json.loads(JsonLines("gateway").format(record))
    assert (facts["id"], facts["code"], facts["field"]) == ('r "7"\n', "invalid_request", "top_p")
    assert (facts["prompt_tokens"], facts["finish"]) == (0, "error")
    assert isinstance(facts["total_s"], float)
    words = record.getMessage()
    assert r'id="r \"7\"\n" finish=error prompt_tokens=0' in words
    assert f"total_s={facts['total_s']:.3f} code=invalid_request" in words
    assert TextLines("gateway").format(record).count("\n") == 0


def test_a_folder_of_logs_is_its_users_alone(tmp_path: Path) -> None:
    run_process(tmp_path / "a" / "b", "")
    assert stat.S_IMODE((tmp_path / "a" / "b" / "20261130-120000-7").stat().st_mode) == 0o700


def test_an_error_id_leads_to_its_cause_after_the_process_is_gone(tmp_path: Path) -> None:
    program = """
from cluster.gateway.statuses import errors_as_status
class Context:
    async def abort(self, code, message, details): print(message, file=sys.stderr)
async def call():
    async with errors_as_status(Context(), "Generate"): raise ValueError("the cause")
asyncio.run(call())
"""
    log, told = run_process(tmp_path, program)
    error_id = told.split()[2]
    assert f"error {error_id} in Generate" in log
    assert "ValueError: the cause" in log


def test_what_nobody_catches_is_logged(tmp_path: Path) -> None:
    log, _ = run_process(
        tmp_path, "t = threading.Thread(target=lambda: 1 / 0, name='reader'); t.start(); t.join()"
    )
    assert "thread reader has ended" in log
    assert "ZeroDivisionError" in log
    log, _ = run_process(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert "Fatal Python error: Segmentation fault" in log


def test_a_place_without_files_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, told = run_process(tmp_path / "file", "logging.getLogger('actors').warning('hello')")
    assert "latentray: no log file in" in told
    assert "WARNING shard 0: hello" in told


def test_a_folder_that_the_user_names_must_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--log-dir .*file/logs cannot be written"):
        check_writable(str(tmp_path / "file" / "logs"))
    check_writable(str(tmp_path / "new"))


def test_the_default_is_the_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_parent() == Path("/state/latentray/logs")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/ada")
    assert default_parent() == Path("/home/ada/.local/state/latentray/logs")
    assert LogSettings(run="r").folder == default_parent() / "r"


def test_old_runs_are_removed_and_nothing_else(tmp_path: Path) -> None:
    names = {"20260101-000000-1": 1, "20260101-000000-2": 2, "mine": 1, new_run(): 1}
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "gateway.log").write_text("x")
        os.utime(tmp_path / name, (0, 0))
        age_days = KEPT_DAYS + (1 if name != "20260101-000000-2" else -1)
        os.utime(tmp_path / name / "gateway.log", (1e9 - age_days * 86400,) * 2)
    (tmp_path / "20260101-000000-3").write_text("a file")
    (tmp_path / "20260101-000000-4").symlink_to(tmp_path / "mine")
    remove_old_runs(tmp_path, now_s=1e9)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"20260101-000000-2", "mine", "20260101-000000-3", "20260101-000000-4"}


def test_a_terminal_shows_whole_lines_of_all_processes_once(tmp_path: Path) -> None:
    shown = io.StringIO()
    follower = LogFollower(tmp_path, shown)
    follower.poll()
    gateway = tmp_path / "gateway.log"
    gateway.write_text("a\nb")
    follower.poll()
    assert shown.getvalue() == "a\n"
    with gateway.open("a") as file:
        file.write("b\n")
    (tmp_path / "shard-0.log").write_text("c\n")
    follower.poll()
    follower.poll()
    assert shown.getvalue() == "a\nbb\nc\n"
    gateway.rename(tmp_path / "gateway.log.1")
    gateway.write_text("new\n")
    follower.poll()
    assert shown.getvalue() == "a\nbb\nc\nnew\n"
    LogFollower(None, shown).poll()
    LogFollower(tmp_path / "none", shown).poll()


def test_a_line_of_statistics_tells_of_the_time_since_the_last_one() -> None:
    before = GroupStats(num_steps=10, num_prompt_tokens=100, num_generated_tokens=200, num_verifies=10)
    now = GroupStats(
        running=3,
        waiting=2,
        num_used_blocks=16,
        num_kv_blocks=64,
        num_steps=20,
        num_prompt_tokens=150,
        num_generated_tokens=300,
        num_verifies=30,
        proposed=(20, 20),
        accepted=(15, 5),
        num_cache_queries=40,
        num_cache_hits=10,
        num_preemptions=1,
    )
    assert stats_line(now, before, 10) == (
        "3 running, 2 waiting, 5.0 prompt tokens/s, 10.0 generated tokens/s, KV blocks 16 of 64, "
        "prefix cache 25%, 2.00 tokens per verify, 1 preemptions"
    )
    assert stats_line(before, before, 10) is None, "idle"
    anew = GroupStats(num_steps=2, num_generated_tokens=5)
    assert stats_line(anew, now, 10) == (
        "0 running, 0 waiting, 0.0 prompt tokens/s, 0.5 generated tokens/s, KV blocks 0 of 0"
    )
