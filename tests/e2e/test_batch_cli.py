"""`latentray batch` with a real engine in the process."""

import gzip
import json
import signal
import time
from pathlib import Path

import pytest

from tests.support.cli_process import SMALL, run, start

pytestmark = pytest.mark.e2e


def chat(custom_id: str, text: str, **more: object) -> str:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 30} | more
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def completion(custom_id: str, **body: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def test_rows_are_answered_and_bad_ones_explained(tmp_path: Path) -> None:
    lines = [
        chat("france", "What is the capital of France?"),
        "{broken",
        completion("king", prompt="The king", temperature=0.9, seed=3, max_tokens=12),
        chat("bad", "x", frequency_penalty=3),
        completion("again", prompt="The king", temperature=0.9, seed=3, max_tokens=12),
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    done = run("batch", "-i", str(source), "-o", str(target), "--executor", "inline", "-tp", "2", *SMALL)
    assert done.returncode == 3, done.stderr
    assert "5 rows, 2 failed" in done.stderr
    assert "completion tokens/s), after" in done.stderr, "the rate is without the start"
    assert done.stdout == ""
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["custom_id"] for r in rows] == ["france", None, "king", "bad", "again"]
    assert [r["response"]["status_code"] for r in rows] == [200, 400, 200, 400, 200]
    message = rows[0]["response"]["body"]["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "The capital of France is Paris.", "refusal": None}
    assert "frequency_penalty" in rows[3]["error"]["message"]
    texts = [rows[i]["response"]["body"]["choices"][0]["text"] for i in (2, 4)]
    assert texts[0] == texts[1] != ""
    assert not list(tmp_path.glob("*.partial"))


def test_pipes_work_and_success_is_exit_code_0() -> None:
    rows = [chat(str(i), f"What is the capital of {name}?") for i, name in enumerate(("France", "Spain"))]
    done = run("batch", "-i", "-", "-o", "-", "--executor", "inline", *SMALL, stdin="\n".join(rows) + "\n\n")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line)["response"]["body"] for line in done.stdout.splitlines()]
    assert [a["choices"][0]["message"]["content"].split()[-1] for a in answers] == ["Paris.", "Madrid."]


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [completion(str(i), prompt="The king", max_tokens=200, ignore_eos=True) for i in range(400)]
    source.write_text("\n".join(rows))
    partial, journal = (tmp_path / f"out.jsonl.{end}" for end in ("partial", "journal"))
    flags = ("--executor", "inline", "--max-in-flight", "4", *SMALL)
    process = start("batch", "-i", str(source), "-o", str(target), *flags)
    try:
        deadline_s = time.monotonic() + 60
        while not (partial.is_file() and partial.read_text().count("\n") >= 3):
            assert time.monotonic() < deadline_s
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    num_kept = partial.read_text().count("\n")
    assert f"ended early: {num_kept} rows are done; the same command goes on from there ({partial}" in errors
    assert "Traceback" not in errors
    assert not target.exists()
    kept = [json.loads(line) for line in partial.read_text().splitlines()]
    told = [json.loads(line) for line in journal.read_text().splitlines()]
    assert [r["custom_id"] for r in kept] == [r["custom_id"] for r in told if "key" in r]


def test_a_restart_that_does_not_start_leaves_what_is_done(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(completion("a", prompt="The king", max_tokens=4))
    command = ("batch", "-i", str(source), "-o", str(target), "--executor", "inline")
    assert run(*command, *SMALL).returncode == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"in.jsonl", "out.jsonl", "out.jsonl.journal"}
    failed = run(*command, "--restart", "--kv-cache-memory-bytes", "9000G", "--max-model-len", "512")
    assert failed.returncode == 4, failed.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_rows_that_fail_may_be_no_failure(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl.gz"
    source.write_text("{broken\n")
    flags = ("--executor", "inline", "--allow-failed-rows", *SMALL)
    done = run("batch", "-i", str(source), "-o", str(target), *flags)
    assert done.returncode == 0, done.stderr
    with gzip.open(target, "rt") as stream:
        assert json.loads(stream.read())["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("flag", ["-i", "-o"])
def test_a_file_is_given_once(tmp_path: Path, flag: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("")
    done = run(
        "batch", "-i", str(source), "-o", "x.jsonl", flag, "y.jsonl", "--executor", "inline", cwd=tmp_path
    )
    assert done.returncode == 2
    assert "is given 2 times" in done.stderr
    assert list(tmp_path.iterdir()) == [source]


def test_an_output_that_takes_no_more_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(completion("a", prompt="The king", max_tokens=3))
    done = run("batch", "-i", str(source), "-o", "/dev/full", "--executor", "inline", *SMALL)
    assert done.returncode == 4
    assert "--output /dev/full takes no more: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
