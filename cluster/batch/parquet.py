"""Rows of Parquet files, as the lines that JSONL has for them.

Columns are the members of a row: custom_id, url, body, and method where there is one. `body` is text that
holds a JSON object, or a struct, of which nulls mean "not given": a column has the members of all rows.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import IO, Any

from kernels_integration.errors import ConfigError

_BATCH_ROWS = 256


def parquet_rows(file: IO[bytes], path: str) -> Iterator[tuple[str, bytes]]:
    """Rows with their numbers, counted from 1. Errors: ConfigError, OSError, ValueError."""
    number = 0
    for batch in _opened(file, path).iter_batches(batch_size=_BATCH_ROWS):
        for record in batch.to_pylist():
            number += 1
            yield f"row {number}", json.dumps(_row(record), default=str).encode()


def count_parquet_rows(file: IO[bytes], path: str) -> int:
    return int(_opened(file, path).metadata.num_rows)


def _opened(file: IO[bytes], path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"--input {path} needs pyarrow: pip install 'latentray[data]'") from error
    # Without pre_buffer a row group is read as its rows are asked for.
    return pyarrow.parquet.ParquetFile(file, pre_buffer=False)


def _row(record: dict[str, Any]) -> dict[str, Any]:
    row = {name: value for name, value in record.items() if value is not None}
    body = row.get("body")
    if isinstance(body, str):
        with contextlib.suppress(ValueError):  # told as a row whose body is text
            row["body"] = json.loads(body)
    else:
        row["body"] = _without_nulls(body)
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(member) for name, member in value.items() if member is not None}
    return [_without_nulls(member) for member in value] if isinstance(value, list) else value
