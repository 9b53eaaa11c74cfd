"""What --input stands for: formats, directories, patterns, URLs; rows come as they are asked for."""

import gzip
import io
import itertools
import json
import os
import random
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cluster.batch import inputs
from cluster.batch import parquet as batch_parquet
from cluster.batch.inputs import BatchInput
from cluster.batch.rows import know
from kernels_integration.errors import ConfigError

zstandard = pytest.importorskip("zstandard")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

LINES = b'{"custom_id": "a"}\n\n  \n{"custom_id": "b"}\n{"custom_id": "c"}'


def ids(name: Path | str) -> list[Any]:
    return [json.loads(row.line)["custom_id"] for row in BatchInput(str(name)).rows()]


def write(path: Path, lines: bytes = LINES) -> Path:
    packed = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}.get(path.suffix)
    path.write_bytes(packed(lines) if packed else lines)
    return path


@pytest.mark.parametrize("name", ["i.jsonl", "i.jsonl.gz", "i.jsonl.zst", "other"])
def test_a_file_of_each_form(tmp_path: Path, name: str) -> None:
    source = BatchInput(str(write(tmp_path / name)))
    for _ in range(2):
        assert [row.place for row in source.rows()] == ["line 1", "line 4", "line 5"]
    assert ids(tmp_path / name) == ["a", "b", "c"]
    assert source.count() == 3


def test_frames_of_zstd_follow_each_other(tmp_path: Path) -> None:
    compressor = zstandard.ZstdCompressor()
    path = tmp_path / "i.jsonl.zst"
    path.write_bytes(
        compressor.compress(b'{"custom_id": "a"}\n') + compressor.compress(b'{"custom_id": "b"}\n')
    )
    assert ids(path) == ["a", "b"]


def test_rows_of_parquet_are_those_of_jsonl(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5},
        {"messages": [{"role": "user", "content": "Ho"}, {"role": "assistant", "content": "?"}], "seed": 3},
    ]
    rows = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "struct.parquet")
    as_text = [row | {"body": json.dumps(row["body"])} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(as_text), tmp_path / "text.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    read = {
        name: list(BatchInput(str(tmp_path / name)).rows()) for name in ("struct.parquet", "text.parquet")
    }
    plain = [know(row) for row in BatchInput(str(tmp_path / "rows.jsonl")).rows()]
    for name, found in read.items():
        assert [know(row) for row in found] == plain, name
        assert [row.place for row in found] == ["row 1", "row 2"]
        assert BatchInput(str(tmp_path / name)).count() == 2


def test_a_directory_stands_for_its_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    write(folder / "b.jsonl.gz", b'{"custom_id": 2}\n')
    write(folder / "a.jsonl", b'{"custom_id": 1}\nbad')
    (folder / "_SUCCESS").touch()
    (folder / ".hidden").touch()
    (folder / "sub").mkdir()
    source = BatchInput(str(folder))
    assert [row.place.removeprefix(f"{folder}/") for row in source.rows()] == [
        "a.jsonl line 1",
        "a.jsonl line 2",
        "b.jsonl.gz line 1",
    ]
    assert source.count() == 3
    (folder / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"holds .*notes\.txt, which is none of \.jsonl"):
        BatchInput(str(folder))
    assert ids(f"{folder}/*.gz") == [2]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(tmp_path: Path) -> None:
    assert ids(write(tmp_path / "rows[1].jsonl")) == ["a", "b", "c"]


@pytest.mark.parametrize("scheme", ["memory://inputs", "file://{folder}"])
def test_urls(tmp_path: Path, scheme: str) -> None:
    base = scheme.format(folder=tmp_path)
    for name, custom_id in (("b.jsonl", "2"), ("a.jsonl.gz", "1")):
        line = json.dumps({"custom_id": custom_id}).encode()
        with fsspec.open(f"{base}/{name}", "wb") as file:
            file.write(gzip.compress(line) if name.endswith(".gz") else line)
    assert ids(f"{base}/b.jsonl") == ["2"]
    assert ids(f"{base}/*.jsonl*") == ids(base) == ["1", "2"]
    assert BatchInput(base).count() is None, "they would be fetched twice"


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES)))
    source = BatchInput("-")
    assert source.count() is None
    assert [row.place for row in source.rows()] == ["line 1", "line 4", "line 5"]


BAD: list[tuple[str, bytes, str]] = [
    ("i.jsonl.gz", b"plain text", "Not a gzipped file"),
    ("i.jsonl.gz", gzip.compress(b"row\n" * 999, mtime=0)[:-9], "ended before"),
    ("i.jsonl.gz", b"\x1f\x8b\x08garbage", ""),
    ("i.jsonl.zst", b"plain text", "Unknown frame"),
    ("i.jsonl.zst", zstandard.ZstdCompressor().compress(b"row\n" * 99_999)[:-5], "middle of a frame"),
    ("i.parquet", b"plain text", ""),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD)
def test_a_broken_file_is_told(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    source = BatchInput(str(path))
    for read in (source.count, lambda: list(source.rows())):
        with pytest.raises(ConfigError, match=rf"--input .*{name} cannot be read: .*{words}"):
            read()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("none.jsonl", "No such file"),
        ("none/*.jsonl", "stands for no file"),
        ("empty", "stands for no file"),
        ("nosuch://x/y", "cannot be reached: Protocol not known"),
        ("memory://none/x.jsonl", "cannot be read"),
        ("a\0b", "cannot be read"),
    ],
)
def test_an_input_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=f"--input .*{words}"):
        BatchInput(name)


def test_a_line_beyond_the_limit_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "MAX_ROW_BYTES", 8)
    path = tmp_path / "i.jsonl"
    path.write_bytes(b"short\n" + b"x" * 50 + b"\n" + b"12345678\n" + b"y" * 9 + b"\nlast")
    read = [bytes(row.line) for row in BatchInput(str(path)).rows()]
    assert [line[:5] for line in read] == [b"short", b"xxxxx", b"12345", b"yyyyy", b"last"]
    assert max(map(len, read)) == 9
    assert BatchInput(str(path)).count() == 5


def test_what_is_read_is_not_written(tmp_path: Path) -> None:
    rows, link = tmp_path / "i.jsonl", tmp_path / "hard.jsonl"
    link.hardlink_to(write(rows))
    for source in (rows, tmp_path / "*.jsonl"):
        with pytest.raises(ConfigError, match="would overwrite --input"):
            BatchInput(str(source)).refuse_output([tmp_path / "new", link])
    for source in (tmp_path, tmp_path / "*.jsonl", tmp_path / "**" / "*.jsonl"):
        with pytest.raises(ConfigError, match=r"would stand for --output .*new\.jsonl, too"):
            BatchInput(str(source)).refuse_output([tmp_path / "new.jsonl"])
    for source in (rows, tmp_path / "i*.jsonl", tmp_path / "*.jsonl"):
        BatchInput(str(source)).refuse_output([tmp_path / "new", tmp_path / "sub" / "new.jsonl"])


def test_a_fifo_is_read_once_and_not_touched_before(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.jsonl"
    os.mkfifo(fifo)
    source = BatchInput(str(fifo))
    assert (source.is_once, source.count()) == (True, None)
    writer = threading.Thread(target=lambda: fifo.write_bytes(LINES))
    writer.start()
    assert [row.place for row in source.rows()] == ["line 1", "line 4", "line 5"]
    writer.join()
    with pytest.raises(ConfigError, match="which is no regular file"):
        BatchInput(str(tmp_path))


def _peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        for _ in BatchInput(str(path)).rows():
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["i.jsonl", "i.jsonl.gz", "i.jsonl.zst"])
def test_ten_times_the_rows_take_no_more_memory(tmp_path: Path, name: str) -> None:
    rng = random.Random(0)
    rows = [json.dumps({"custom_id": "a", "prompt": rng.randbytes(500).hex()}).encode() for _ in range(4000)]
    few, many = tmp_path / f"few-{name}", tmp_path / f"many-{name}"
    write(few, b"\n".join(rows[:400]))
    write(many, b"\n".join(rows))
    _peak_bytes(few)  # imports
    assert _peak_bytes(many) < 1.5 * _peak_bytes(few) + 100_000
    assert _peak_bytes(many) < 0.5 * sum(map(len, rows))


def test_parquet_is_read_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pyarrow.Table.from_pylist([{"custom_id": str(i), "body": "{}"} for i in range(5000)])
    parquet.write_table(table, tmp_path / "i.parquet", row_group_size=500)
    made: list[int] = []
    rows = BatchInput(str(tmp_path / "i.parquet")).rows()
    real = batch_parquet._opened

    class Counted:
        def __init__(self, file: Any, path: str) -> None:
            self._file = real(file, path)

        def iter_batches(self, **options: Any) -> Any:
            for batch in self._file.iter_batches(**options):
                made.append(len(batch))
                yield batch

    monkeypatch.setattr(batch_parquet, "_opened", Counted)
    assert len(list(itertools.islice(rows, 10))) == 10
    assert sum(made) <= 500
    assert len(list(rows)) == 4990
    assert sum(made) == 5000
