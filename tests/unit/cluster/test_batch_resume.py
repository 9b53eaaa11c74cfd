"""A batch that is killed goes on: what its journal and its rows are worth, cut at any byte."""

import gzip
import json
import os
import shutil
import stat
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from actors.requests import Request
from cluster.batch import BatchSummary, run_batch
from cluster.batch.plan import FilePlan, StreamPlan, plan_output
from cluster.batch.progress import BatchProgress, read_progress
from cluster.batch.rows import InputRow, know
from cluster.batch.work import BatchWork, open_work
from cluster.config import BUNDLED_CHECKPOINT
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import ConfigError, InvalidRequestError, OverloadedError, UnavailableError
from tests.support.scripted_engine import Answer, ScriptedEngine

MISSING = object()
SETTINGS = {"model": "m", "dtype": "float32"}


@pytest.fixture(scope="module")
def frontend() -> ModelFrontend:
    return ModelFrontend.from_pretrained(
        BUNDLED_CHECKPOINT, served_model_name="tiny-dsa", max_model_len=64, seed=0
    )


@pytest.fixture(autouse=True)
def _one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers hold the time they were made at, and are compared as bytes."""
    monkeypatch.setattr("cluster.openai.answers.time.time", lambda: 1.0)


def row(custom_id: str, prompt: list[int] | None = None) -> str:
    body = {"prompt": prompt or [3 + len(custom_id), 7]}
    return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": body})


ROWS = [row("a"), "bad", row("bb"), row("a"), row("ccc"), row("dddd", [999_999]), row("eeeee")]
"""Five good ones; one is no JSON, one has a taken id, one a token that is none."""


class Killed(BaseException):
    pass


def answer_until(num_answers: int | None) -> Callable[[Request], Answer]:
    """kill -9 instead of the answer after so many."""
    answered: list[str] = []

    def answer(request: Request) -> Answer:
        if len(answered) == num_answers:
            raise Killed
        answered.append(request.request_id)
        return tuple(t for t in request.prompt_token_ids if t > 2)

    return answer


class Batch:
    """One output and what runs on it did."""

    def __init__(self, folder: Path, frontend: ModelFrontend, name: str = "o.jsonl", **plan: Any) -> None:
        self.out = folder / name
        self.frontend = frontend
        plan_ = plan_output(str(self.out), errors=None, journal=None, **plan)
        assert isinstance(plan_, FilePlan)
        self.plan = plan_
        self.asked: list[int] = []
        """Requests of each run."""
        self.work: BatchWork

    @contextmanager
    def open(self, **options: Any) -> Iterator[BatchWork]:
        options = {"settings": SETTINGS, "restart": False} | options
        with open_work(self.plan.journal, self.plan.target, self.plan.errors, **options) as self.work:
            yield self.work

    def run(
        self,
        lines: list[str] = ROWS,
        *,
        answer: Callable[[Request], Answer] | None = None,
        retry_failed: bool = False,
        **options: Any,
    ) -> BatchSummary | None:
        """None: there was nothing to do."""
        rows = [InputRow(line=line, place=f"line {n}") for n, line in enumerate(lines, start=1)]
        engine = ScriptedEngine(answer or answer_until(None))
        with self.open(**options) as work:
            if work.is_whole and work.whole_already(map(know, rows)) and not retry_failed:
                return None
            work.begin(num_rows=len(rows), retry_failed=retry_failed)
            try:
                summary = run_batch(
                    rows,
                    work,
                    engine=engine,
                    frontend=self.frontend,
                    max_in_flight=2,
                    sleep=lambda seconds: None,
                )
            finally:
                self.asked.append(len(engine.submitted))
            work.finish()
        return summary

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.read_text().splitlines()]

    def names(self) -> set[str]:
        return {path.name for path in self.out.parent.iterdir()}


@pytest.fixture
def batch(tmp_path: Path, frontend: ModelFrontend) -> Batch:
    return Batch(tmp_path, frontend)


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory, frontend: ModelFrontend) -> bytes:
    other = Batch(tmp_path_factory.mktemp("undisturbed"), frontend)
    other.run()
    return other.out.read_bytes()


def test_a_run_to_the_end(batch: Batch) -> None:
    summary = batch.run()
    assert summary is not None
    assert (summary.num_rows, summary.num_failed) == (7, 3)
    assert [r["custom_id"] for r in batch.rows()] == ["a", None, "bb", "a", "ccc", "dddd", "eeeee"]
    assert [r["error"] is None for r in batch.rows()] == [True, False, True, False, True, False, True]
    failed = [json.loads(line) for line in (batch.out.parent / "o.errors.jsonl").read_text().splitlines()]
    assert failed == [r for r in batch.rows() if r["error"]]
    assert batch.names() == {"o.jsonl", "o.jsonl.journal", "o.errors.jsonl"}


@pytest.mark.parametrize("num_answers", range(4))
def test_a_killed_run_goes_on(batch: Batch, undisturbed: bytes, num_answers: int) -> None:
    with pytest.raises(Killed):
        batch.run(answer=answer_until(num_answers))
    assert not batch.out.exists()
    summary = batch.run()
    assert summary is not None
    assert (summary.num_rows, summary.num_failed) == (7, 3), "of all rows, whoever has answered them"
    assert batch.out.read_bytes() == undisturbed
    assert batch.asked[1] == 4 - num_answers, "no row is asked for twice"


def test_cut_at_any_byte(tmp_path: Path, frontend: ModelFrontend, undisturbed: bytes) -> None:
    """A journal and its rows after kill -9: each is a beginning of what was written, rows first."""
    first = Batch(tmp_path, frontend)
    with pytest.raises(Killed):
        first.run(answer=answer_until(3))
    journal, partial = (tmp_path / f"o.jsonl.{end}" for end in ("journal", "partial"))
    lines, rows = journal.read_bytes().splitlines(keepends=True), partial.read_bytes()
    records = [json.loads(line) for line in lines]
    assert sum("key" in record for record in records) == 6
    header = len(lines[0])
    cases = 0
    for cut in range(header, len(journal.read_bytes()) + 1, 23):
        told = [json.loads(line) for line in journal.read_bytes()[:cut].splitlines(keepends=True)[:-1]]
        end = max((r["start"] + r["size"] for r in told if "key" in r), default=0)
        for rows_cut in {end, min(end + 5, len(rows)), len(rows)}:
            folder = tmp_path / f"{cut}-{rows_cut}"
            folder.mkdir()
            (folder / journal.name).write_bytes(journal.read_bytes()[:cut])
            (folder / partial.name).write_bytes(rows[:rows_cut])
            other = Batch(folder, frontend)
            other.run()
            assert other.out.read_bytes() == undisturbed, (cut, rows_cut)
            assert other.asked[0] <= 4
            cases += 1
            shutil.rmtree(folder)
    assert cases > 50


def test_rows_that_a_dead_node_did_not_keep_are_asked_for_again(batch: Batch, undisturbed: bytes) -> None:
    """The journal may tell of rows of which the disk has zeros, or nothing."""
    with pytest.raises(Killed):
        batch.run(answer=answer_until(3))
    partial = Path(f"{batch.out}.partial")
    content = partial.read_bytes()
    partial.write_bytes(content[:10] + bytes(len(content) // 2))
    batch.run()
    assert batch.out.read_bytes() == undisturbed


def test_a_second_run_does_nothing(batch: Batch) -> None:
    batch.run()
    before = {name: (batch.out.parent / name).stat().st_mtime_ns for name in batch.names()}
    assert batch.run() is None
    spaced = [json.dumps(json.loads(ROWS[0]), indent=1).replace("\n", " "), *ROWS[1:]]
    assert batch.run(spaced) is None, "the same rows, written otherwise"
    assert {name: (batch.out.parent / name).stat().st_mtime_ns for name in batch.names()} == before
    assert batch.asked == [4]


@pytest.mark.parametrize("name", ["o.jsonl", "o.jsonl.gz"])
def test_an_input_that_has_changed(tmp_path: Path, frontend: ModelFrontend, name: str) -> None:
    batch = Batch(tmp_path, frontend, name)
    batch.run()
    lines = [row("new"), ROWS[4], row("bb", [50, 51]), ROWS[0], "bad"]  # and others are gone
    batch.run(lines)
    assert batch.asked == [4, 2], "the new one, and the one that asks for something else"
    assert (batch.work.num_reused, batch.work.num_changed, batch.work.changed) == (2, 1, ["'bb'"])
    text = gzip.decompress(batch.out.read_bytes()) if name.endswith(".gz") else batch.out.read_bytes()
    assert [json.loads(line)["custom_id"] for line in text.splitlines()] == ["new", "ccc", "bb", "a", None]
    other = Batch(tmp_path / "..", frontend, f"{tmp_path.name}-other.jsonl")
    other.run(lines)
    assert other.out.read_bytes() == text
    assert batch.run(lines) is None
    assert not [n for n in batch.names() if n.endswith((".partial", ".new"))]


def test_a_body_that_changes_while_a_batch_is_on_its_way(batch: Batch) -> None:
    with pytest.raises(Killed):
        batch.run([row("a"), row("bb"), row("ccc"), row("dddd")], answer=answer_until(3))
    batch.run([row("a", [40, 41]), row("bb"), row("ccc"), row("dddd")])
    fresh = Batch(batch.out.parent, batch.frontend, "fresh.jsonl")
    fresh.run([row("a", [40, 41]), row("bb"), row("ccc"), row("dddd")])
    assert batch.out.read_bytes() == fresh.out.read_bytes()


def test_other_settings_are_refused_by_name(batch: Batch) -> None:
    batch.run()
    content = batch.out.read_bytes()
    with pytest.raises(ConfigError, match=r"dtype was 'float32' and is 'bfloat16'.*--restart"):
        batch.run(settings=SETTINGS | {"dtype": "bfloat16"})
    assert batch.out.read_bytes() == content
    batch.run(settings=SETTINGS | {"dtype": "bfloat16"}, restart=True)
    assert batch.asked == [4, 4]
    with pytest.raises(ConfigError, match="dtype was 'bfloat16'"):
        batch.run()


def test_failed_rows_are_asked_for_again_when_asked_to(batch: Batch) -> None:
    def busy(request: Request) -> Answer:
        return OverloadedError("queue full") if len(request.prompt_token_ids) == 3 else (5,)

    lines = [row("a"), row("bb", [5, 6, 7]), row("ccc", [10**9])]
    batch.run(lines, answer=busy)
    assert [bool(r["error"]) for r in batch.rows()] == [False, True, True]
    assert batch.run(lines) is None, "they have failed, and that is the answer"
    assert batch.run(lines, retry_failed=True)
    assert [bool(r["error"]) for r in batch.rows()] == [False, False, True]
    assert batch.asked == [1 + 4, 1]
    batch.run(lines[:2])
    assert batch.names() == {"o.jsonl", "o.jsonl.journal"}, "an errors file without errors is gone"


def test_an_output_that_somebody_changed_is_made_anew(batch: Batch, undisturbed: bytes) -> None:
    batch.run()
    with batch.out.open("ab") as stream:
        stream.write(b"more\n")
    batch.run()
    assert "is not as it was finished" in batch.work.notes[0]
    assert batch.out.read_bytes() == undisturbed
    batch.out.unlink()
    batch.run()
    assert batch.out.read_bytes() == undisturbed
    assert batch.asked == [4, 4, 4]


def test_two_runs_on_one_output_are_refused(batch: Batch) -> None:
    with batch.open() as work:
        work.begin(num_rows=1)
        with pytest.raises(ConfigError, match=r"being written by another run .*o\.jsonl\.journal"):
            batch.run()
        with pytest.raises(ConfigError, match="being written by another run"):
            batch.run(restart=True)
    batch.run()


def test_an_engine_that_is_lost_is_no_end(batch: Batch, undisturbed: bytes) -> None:
    def lost(request: Request) -> Answer:
        return UnavailableError("shard 1 is lost")

    with pytest.raises(UnavailableError):
        batch.run(answer=lost)
    batch.run()
    assert batch.out.read_bytes() == undisturbed


def test_a_run_killed_before_its_first_row_binds_nobody(batch: Batch) -> None:
    with batch.open() as work:
        work.begin(num_rows=1)
        for name in ("journal", "partial"):
            shutil.copy(f"{batch.out}.{name}", batch.out.parent / name)
    for name in ("journal", "partial"):
        (batch.out.parent / name).rename(f"{batch.out}.{name}")
    batch.run(settings=SETTINGS | {"dtype": "bfloat16"})
    assert len(batch.rows()) == 7


def test_nothing_done_leaves_nothing(batch: Batch) -> None:
    with pytest.raises(Killed):
        batch.run([row("a")], answer=answer_until(0))
    with pytest.raises(InvalidRequestError), batch.open():
        raise InvalidRequestError("before it begins", field="x")
    assert batch.names() == set()
    batch.run([])
    assert batch.out.read_bytes() == b""
    assert batch.run([]) is None


def test_what_is_not_ours_is_left_alone(batch: Batch) -> None:
    journal, partial = (batch.out.with_name(f"o.jsonl.{end}") for end in ("journal", "partial"))
    partial.write_text("mine\n")
    with pytest.raises(ConfigError, match=r"o\.jsonl\.partial is there without its journal"):
        batch.run()
    assert batch.names() == {partial.name}
    partial.unlink()
    for content in ("mine\n", "", '{"journal": 99, "settings": {}}\n', '{"journal": 1'):
        journal.write_text(content)
        with pytest.raises(ConfigError, match="is no journal that this version of latentray reads"):
            batch.run()
        assert journal.read_text() == content
    journal.unlink()
    victim = batch.out.with_name("victim")
    victim.write_text("precious")
    for planted in (journal, partial, batch.out.with_name("o.jsonl.journal.new"), Path(f"{batch.out}.new")):
        planted.symlink_to(victim)
        try:
            batch.run()
        except ConfigError:
            planted.unlink()
        assert victim.read_text() == "precious", planted
        for path in batch.out.parent.iterdir():
            if path != victim:
                path.unlink()


def test_files_are_the_users_alone(batch: Batch) -> None:
    modes: list[int] = []

    def answer(request: Request) -> Answer:
        modes.extend(stat.S_IMODE(p.stat().st_mode) for p in batch.out.parent.iterdir())
        return (5,)

    before = os.umask(0o022)
    try:
        batch.run([row("a")], answer=answer)
    finally:
        os.umask(before)
    assert modes == [0o600, 0o600]
    assert stat.S_IMODE(batch.out.stat().st_mode) == 0o600


def test_the_journal_tells_which_run_has_answered_what(batch: Batch) -> None:
    with pytest.raises(Killed):
        batch.run(answer=answer_until(2))
    with pytest.raises(Killed):
        batch.run(answer=answer_until(1))
    batch.run()
    records = [json.loads(line) for line in batch.plan.journal.read_text().splitlines()]
    runs = Counter(r["run"] for r in records if r.get("custom_id") and not r["failed"])
    assert runs == {1: 2, 2: 1, 3: 1}
    assert records[-1]["whole"]["rows"] == 7


def test_a_url_is_written_at_once_and_gone_on_with(tmp_path: Path, frontend: ModelFrontend) -> None:
    url = "memory://answers/deep/o.jsonl.gz"
    with pytest.raises(ConfigError, match="pass --journal FILE"):
        plan_output(url, errors=None, journal=None)
    batch = Batch(tmp_path, frontend)
    plan = plan_output(url, errors=None, journal=str(tmp_path / "j"))
    assert isinstance(plan, FilePlan)
    batch.plan = plan
    with pytest.raises(Killed):
        batch.run(answer=answer_until(2))
    assert not fsspec.filesystem("memory").exists("/answers/deep/o.jsonl.gz")
    batch.run()
    with fsspec.open(url, "rb", compression="gzip") as stream:
        rows = [json.loads(line) for line in stream.read().splitlines()]
    assert [r["custom_id"] for r in rows] == ["a", None, "bb", "a", "ccc", "dddd", "eeeee"]
    with fsspec.open("memory://answers/deep/o.errors.jsonl.gz", "rb", compression="gzip") as stream:
        assert len(stream.read().splitlines()) == 3
    assert batch.run() is None
    batch.run([*ROWS, row("f" * 9)])
    assert batch.asked == [2 + 2, 2, 1]
    assert batch.names() == {"j"}


def test_plans_that_do_not_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan_output("-", errors="e.jsonl", journal=None) == StreamPlan(output="-", errors="e.jsonl")
    bad: list[tuple[str, str | None, str | None, str]] = [
        ("-", None, "j", "--journal j is of no use: --output - is a stream"),
        ("o.jsonl.zst", None, None, "pass a name in .jsonl"),
        ("o.parquet", None, None, "pass a name in .jsonl"),
        ("o.jsonl", "o.jsonl", None, "are one file"),
        ("o.jsonl", None, "o.jsonl", "are one file"),
        ("o.jsonl", None, "/dev/null", "--journal /dev/null is no regular file"),
        ("none/o.jsonl", None, None, "--output none/o.jsonl cannot be written: its directory does not exist"),
        ("nosuch://o.jsonl", None, "j", "Protocol not known"),
    ]
    for output, errors, journal, words in bad:
        with pytest.raises(ConfigError, match=words):
            plan_output(output, errors=errors, journal=journal)
    assert list(tmp_path.iterdir()) == []


def test_how_far_it_is(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BatchProgress] = []
    clock = iter(range(1000, 2000))
    monkeypatch.setattr("cluster.batch.work.time.time", lambda: next(clock))
    monkeypatch.setattr("cluster.batch.progress.time.time", lambda: next(clock))

    def answer(request: Request) -> Answer:
        seen.append(read_progress(batch.plan.journal))
        return answer_until(None)(request)

    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_progress(batch.plan.journal)
    with pytest.raises(Killed):
        batch.run(answer=lambda request: answer(request) if len(seen) < 2 else answer_until(0)(request))
    assert [(p.state, p.num_rows, p.run) for p in seen] == [("running", 7, 1)] * 2
    assert seen[1].num_done == seen[0].num_done + 1
    assert seen[1].rows_per_s == pytest.approx(1, rel=0.5), "the clock goes on a second a row"
    left = 7 - seen[1].num_done
    assert seen[1].left_s == pytest.approx(left / (seen[1].rows_per_s or 1))
    stopped = read_progress(batch.plan.journal)
    assert (stopped.state, stopped.rows_per_s, stopped.left_s) == ("interrupted", None, None)
    batch.run(answer=answer)
    assert (seen[2].run, seen[2].state) == (2, "running")
    whole = read_progress(batch.plan.journal)
    assert (whole.state, whole.num_rows, whole.num_done, whole.num_failed) == ("whole", 7, 7, 3)


def test_ten_times_the_rows_take_no_more_memory_than_their_names(
    tmp_path: Path, frontend: ModelFrontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the first row is the last to end, and all others wait for it. (The scripted engine ends the
    newest first.)"""
    monkeypatch.setattr("cluster.batch.window.MAX_ROWS", 20)
    row_bytes = 8_000

    def peak_bytes(num_rows: int) -> int:
        def rows() -> Iterator[InputRow]:
            for i in range(num_rows):
                body = {"prompt": [3, 7], "user": "x" * row_bytes, "max_tokens": 60 if i == 0 else 1}
                row = {"custom_id": str(i), "url": "/v1/completions", "body": body}
                yield InputRow(line=json.dumps(row), place=f"line {i}")

        def answer(request: Request) -> Answer:
            engine.submitted.clear()
            return (5,)

        engine = ScriptedEngine(answer)
        batch = Batch(tmp_path, frontend, f"{num_rows}.jsonl")
        with batch.open() as work:
            work.begin(num_rows=None)
            tracemalloc.start()
            try:
                run_batch(rows(), work, engine=engine, frontend=frontend, max_in_flight=2)
                work.finish()
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert batch.out.read_bytes().count(b"\n") == num_rows
        return peak

    peak_bytes(10)  # imports
    few, many = peak_bytes(50), peak_bytes(500)
    assert many - few < 450 * 500, "of each row its name and place, not the row"
    assert few > 20 * row_bytes, "a window of rows is in it"


def test_a_link_in_place_of_the_errors_file_is_followed_only_if_it_is_named(tmp_path: Path) -> None:
    output, planted = tmp_path / "o.jsonl", tmp_path / "o.errors.jsonl"
    planted.symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"o\.errors\.jsonl, where failed rows go, is a link; move it away"):
        plan_output(str(output), errors=None, journal=None)
    plan = plan_output(str(output), errors=str(planted), journal=None)
    assert isinstance(plan, FilePlan)
    assert tmp_path / "victim" in plan.local


FIELDS = {
    "custom_id": [7, MISSING],
    "key": ["zz", "ab", 3, None],
    "failed": [1, None, MISSING],
    "run": ["1", -1, True, MISSING],
    "start": [-1, 0.5, 2**70, MISSING],
    "size": [None, MISSING],
    "crc": ["7", MISSING],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in FIELDS for value in FIELDS[name]])
def test_a_journal_that_somebody_edited_is_refused_with_the_line_and_the_field(
    batch: Batch, name: str, value: object
) -> None:
    with pytest.raises(Killed):
        batch.run(answer=answer_until(3))
    lines = batch.plan.journal.read_text().splitlines()
    record = json.loads(lines[2])
    del record[name]
    lines[2] = json.dumps(record | ({} if value is MISSING else {name: value}))
    edited = "\n".join(lines) + "\n"
    batch.plan.journal.write_text(edited)
    with pytest.raises(ConfigError, match=rf"line 3 of the journal .* is not as .*: {name} is "):
        batch.run()
    assert batch.plan.journal.read_text() == edited, "nothing of it is thrown away"
    batch.run(restart=True)
    assert len(batch.rows()) == len(ROWS)


@pytest.mark.parametrize("line", ["{}", '{"whole": 1}', '{"whole": {"rows": 1}}', '{"run": "x", "done": 1}'])
def test_a_line_of_no_kind_is_refused_by_status_and_by_the_next_run(batch: Batch, line: str) -> None:
    with pytest.raises(Killed):
        batch.run(answer=answer_until(3))
    with batch.plan.journal.open("a") as journal:
        journal.write(line + "\n")
    number = len(batch.plan.journal.read_text().splitlines())
    with pytest.raises(ConfigError, match=f"line {number} of the journal"):
        batch.run()
    if line != "{}":  # status looks for the newest line that says how far it is
        with pytest.raises(ConfigError, match="latentray has not written"):
            read_progress(batch.plan.journal)


def test_a_run_killed_when_all_was_answered_asks_for_nothing(batch: Batch, undisturbed: bytes) -> None:
    """Between the last row and the output: the next run needs no engine for what is left."""
    with batch.open() as work:
        work.begin(num_rows=len(ROWS))
        batch_of(batch, work, ScriptedEngine(answer_until(None)))
    assert not batch.out.exists(), "it was killed before"
    rows = [InputRow(line=line, place=f"line {n}") for n, line in enumerate(ROWS, start=1)]
    with batch.open() as work:
        work.begin(num_rows=len(ROWS))
        assert not work.needs_answers(map(know, rows))
        batch_of(batch, work, None)
        work.finish()
    assert batch.out.read_bytes() == undisturbed
    with batch.open() as work:
        work.begin(num_rows=len(ROWS), retry_failed=True)
        assert work.needs_answers(map(know, rows)), "a row that has failed is asked for again"
    more = InputRow(line=row("new"), place="line 8")
    with batch.open() as work:
        work.begin(num_rows=len(ROWS) + 1)
        assert work.needs_answers(map(know, [*rows, more]))


def batch_of(batch: Batch, work: BatchWork, engine: Any) -> None:
    rows = [InputRow(line=line, place=f"line {n}") for n, line in enumerate(ROWS, start=1)]
    run_batch(rows, work, engine=engine, frontend=batch.frontend, max_in_flight=2)
