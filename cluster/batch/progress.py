"""How far a batch is, read from its journal while it runs, or afterwards."""

import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.batch.records import fault_of
from kernels_integration.errors import ConfigError

_TAIL_BYTES = 64 * 2**10
_RATE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """state: running; interrupted: its process is gone; whole: the output is there.

    num_rows: of the input, where known. rows_per_s: of the last minute, while it runs; left_s: by that.
    """

    state: Literal["running", "interrupted", "whole"]
    num_rows: int | None
    num_done: int
    num_failed: int
    run: int
    rows_per_s: float | None = None
    left_s: float | None = None


def read_progress(journal: Path) -> BatchProgress:
    """Errors: ConfigError when there is no journal."""
    try:
        with journal.open("rb") as stream:
            is_running = _is_locked(stream.fileno())
            if "journal" not in _parsed(stream.readline()):
                raise ConfigError(f"{journal} is no journal of a batch")
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - _TAIL_BYTES))
            tail = [record for line in stream.read().split(b"\n") if (record := _parsed(line))]
    except OSError as error:
        raise ConfigError(
            f"{journal} cannot be read: {error.strerror}; pass the --output, or the --journal, of a batch"
        ) from error
    last: dict[str, Any] = next(
        (record for record in reversed(tail) if "done" in record or "whole" in record), {}
    )
    run = last.get("run", 0)
    if last and (fault := fault_of(last)) is not None:
        raise ConfigError(f"{journal} has a line that latentray has not written: {fault}")
    if (whole := last.get("whole")) is not None:
        num_rows = whole["rows"]
        return BatchProgress(
            state="whole", num_rows=num_rows, num_done=num_rows, num_failed=whole["failed"], run=run
        )
    num_rows, num_done = last.get("rows"), last.get("done", 0)
    per_s = left_s = None
    if is_running:
        now_s = time.time()
        ats = [r["at"] for r in tail if r.get("run") == run and r.get("at", 0) > now_s - _RATE_S]
        per_s = len(ats) / (now_s - ats[0]) if len(ats) > 1 and now_s > ats[0] else 0.0
        left_s = (num_rows - num_done) / per_s if num_rows is not None and per_s else None
    return BatchProgress(
        state="running" if is_running else "interrupted",
        num_rows=num_rows,
        num_done=num_done,
        num_failed=last.get("num_failed", 0),
        rows_per_s=per_s,
        left_s=left_s,
        run=run,
    )


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
