"""Files of a batch: outputs of every kind, what an interruption leaves, inputs that do not work."""

import gzip
import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.report.output_file import OutputFile, open_output
from kernels_integration.errors import ConfigError, UnavailableError


def write_rows(path: Path | str, *rows: str, interrupted: bool = False, **options: str) -> OutputFile:
    with open_output(str(path), **options) as output:
        for row in rows:
            output.write(row)
        if interrupted:
            raise KeyboardInterrupt
    return output


def interrupt(path: Path | str, *rows: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_rows(path, *rows, interrupted=True)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    out, partial = tmp_path / "o.jsonl", tmp_path / "o.jsonl.partial"
    with open_output(str(out)) as output:
        output.write("é")
        assert partial.read_text() == "é\n"
        assert output.where == str(partial)
        assert not out.exists()
    assert out.read_text() == "é\n"
    assert not partial.exists()
    interrupt(out, "new")
    assert out.read_text() == "é\n", "an older result stays whole"
    assert partial.read_text() == "new\n"


def test_a_file_of_answers_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write_rows(tmp_path / "o.jsonl", "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "o.jsonl").stat().st_mode) == 0o600


def test_a_batch_that_ends_before_its_first_answer_leaves_no_file(tmp_path: Path) -> None:
    interrupt(tmp_path / "o.jsonl")
    assert names(tmp_path) == set()
    write_rows(tmp_path / "o.jsonl")
    assert (tmp_path / "o.jsonl").read_text() == "", "no rows, and whole"


def test_the_rows_of_an_earlier_run_are_never_lost(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    interrupt(out, "earlier")
    interrupt(out)  # the next one does not even start
    assert (tmp_path / "o.jsonl.partial").read_text() == "earlier\n"
    interrupt(out, "later")
    assert (tmp_path / "o.jsonl.partial").read_text() == "earlier\n"
    assert (tmp_path / "o.jsonl.partial.2").read_text() == "later\n"
    write_rows(out, "whole")
    assert out.read_text() == "whole\n"
    assert names(tmp_path) == {"o.jsonl", "o.jsonl.partial", "o.jsonl.partial.2"}


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("old.jsonl", "dangling.jsonl"):
        target, link = tmp_path / "there" / name, tmp_path / name
        link.symlink_to(target)
        if name == "old.jsonl":
            target.write_text("old")
        write_rows(link, "new")
        assert link.is_symlink()
        assert target.read_text() == "new\n"
    assert names(tmp_path / "there") == {"old.jsonl", "dangling.jsonl"}


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim, dangling = tmp_path / "victim", tmp_path / "new"
    victim.write_text("precious")
    (tmp_path / "o.jsonl.partial").symlink_to(victim)
    (tmp_path / "o.jsonl.partial.2").symlink_to(dangling)
    write_rows(tmp_path / "o.jsonl", "row")
    assert (tmp_path / "o.jsonl").read_text() == "row\n"
    assert victim.read_text() == "precious"
    assert not dangling.exists()


def test_a_device_is_written_into(tmp_path: Path) -> None:
    write_rows("/dev/null", "row")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    link = tmp_path / "null"
    link.symlink_to("/dev/null")
    write_rows(link, "row", input_path="/dev/null")
    assert link.is_symlink()
    assert names(tmp_path) == {"null"}


def test_the_reader_of_a_fifo_gets_the_rows(tmp_path: Path) -> None:
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    reader.start()
    write_rows(fifo, "a", "b")
    reader.join(timeout=30)
    assert read == ["a\nb\n"]
    assert names(tmp_path) == {"fifo"}


def test_a_log_that_a_shell_appends_to_is_not_replaced(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    with log.open("a") as stream:
        write_rows(f"/dev/fd/{stream.fileno()}", "row")
    assert log.read_text() == "before\nrow\n"
    assert names(tmp_path) == {"log"}


def test_stdout_is_written_to_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with open_output("-") as output:
        output.write("é")
        assert capfd.readouterr().out == "é\n"
    write_rows("/dev/stdout", "b")
    assert capfd.readouterr().out == "b\n"


def test_two_batches_on_one_output_are_refused(tmp_path: Path) -> None:
    out, link = tmp_path / "o.jsonl", tmp_path / "link"
    link.symlink_to(out)
    with open_output(str(out)) as output:
        output.write("mine")
        for path in (out, link):
            with pytest.raises(ConfigError, match="is being written by another run"):
                write_rows(path, "other")
        write_rows(tmp_path / "o", "another file")
    assert out.read_text() == "mine\n"
    assert names(tmp_path) == {"o.jsonl", "link", "o"}
    write_rows(out, "later")
    assert out.read_text() == "later\n"


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnavailableError, match="--output /dev/full takes no more: No space left"):
        write_rows("/dev/full", "row")
    write, room = os.write, [25]

    def write_while_there_is_room(descriptor: int, data: memoryview) -> int:
        taken = min(len(data), room[0])
        room[0] -= taken
        return write(descriptor, data[:taken]) if taken else write(os.open("/dev/full", os.O_WRONLY), data)

    monkeypatch.setattr(os, "write", write_while_there_is_room)
    with pytest.raises(UnavailableError, match="No space left"):
        write_rows(tmp_path / "o.jsonl", "first row", "second row", "third row")
    assert (tmp_path / "o.jsonl.partial").read_text() == "first row\nsecond row\n", "whole rows alone"


def test_a_reader_that_goes_away_is_told() -> None:
    """In a process of its own: whether Python says more when it flushes at its end is part of it."""
    program = (
        "import sys\n"
        "from cluster.report.output_file import open_output\n"
        "from kernels_integration.errors import UnavailableError\n"
        "try:\n"
        "    with open_output('-') as output:\n"
        "        for _ in range(100_000): output.write('x' * 100)\n"
        "except UnavailableError as error: sys.exit(f'told: {error}')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == "told: --output - takes no more: Broken pipe\n"
    assert process.wait() == 1


def test_a_lone_surrogate_is_written_as_its_escape(tmp_path: Path) -> None:
    row = {"key \ud800": "value \udfff", "é": "\\"}
    write_rows(tmp_path / "o.jsonl", json.dumps(row, ensure_ascii=False))
    assert json.loads((tmp_path / "o.jsonl").read_bytes()) == row


def test_gzip_by_name(tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl.gz"
    write_rows(out, "é", "b")
    assert gzip.decompress(out.read_bytes()).decode() == "é\nb\n"
    interrupt(out, "kept")
    with gzip.open(f"{out}.partial") as stream:
        assert stream.readline() == b"kept\n"


def missing(folder: Path) -> Path:
    return folder / "no" / "o.jsonl"


@pytest.mark.parametrize(
    "make", [missing, lambda folder: folder, lambda folder: f"{folder}/x/", lambda _: "", lambda _: "a\0b"]
)
def test_outputs_that_do_not_work_are_named(tmp_path: Path, make: Callable[[Path], Path | str]) -> None:
    with pytest.raises(ConfigError, match=r"--output .*cannot be written"):
        write_rows(make(tmp_path))


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    rows, link, other = tmp_path / "i.jsonl", tmp_path / "link.jsonl", tmp_path / "hard.jsonl"
    rows.write_text("row\n")
    link.symlink_to(rows)
    other.hardlink_to(rows)
    for source, target in ((rows, rows), (rows, link), (link, rows), (other, rows)):
        with pytest.raises(ConfigError, match="would overwrite --input"):
            write_rows(target, input_path=str(source))
    assert rows.read_text() == "row\n"
    write_rows(tmp_path / "o2.jsonl", "answer", input_path=str(rows))


def test_answers_of_an_interrupted_run_may_be_the_input(tmp_path: Path) -> None:
    partial = tmp_path / "o.jsonl.partial"
    partial.write_text("row\n")
    write_rows(tmp_path / "o.jsonl", "answer", input_path=str(partial))
    assert partial.read_text() == "row\n"


@pytest.fixture
def stdin_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    streams = []

    def redirect(path: Path) -> None:
        streams.append(path.open())
        monkeypatch.setattr(sys, "stdin", streams[-1])

    yield redirect
    for stream in streams:
        stream.close()


def test_a_redirected_input_is_not_overwritten(tmp_path: Path, stdin_of: Callable[[Path], None]) -> None:
    rows = tmp_path / "i.jsonl"
    rows.write_text("row\n")
    stdin_of(rows)
    with pytest.raises(ConfigError, match="would overwrite --input -"):
        write_rows(rows, input_path="-")
