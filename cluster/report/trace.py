"""A trace of steps across coordinator and shards, in the format of Chrome's about:tracing and Perfetto.

Source: "Trace Event Format" (complete events, ph "X"; times in microseconds).
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cluster.report.output_file import check_output, open_output
from kernels_integration.spans import Span

_NUM_ASKS = 5

Trace = Mapping[str, Sequence[Span]]
"""By actor: "coordinator", "shard 0", ... All start_ns are of one clock."""


class TraceFile:
    """One JSON file; `add` may be called many times, `write` once at the end."""

    def __init__(self, path: str) -> None:
        """Errors: ConfigError when the file cannot be written - now, not after a day."""
        self._path = path
        self._events: list[dict[str, Any]] = []
        self._process_ids: dict[str, int] = {}
        check_output(path, flag="trace file")

    def add(self, trace: Trace, group: str = "") -> None:
        """One process an actor. group: tells apart the actors of several groups of one file."""
        for actor, spans in trace.items():
            process_id = self._process(f"{group} {actor}".strip())
            self._events += [_event(span, process_id) for span in spans]

    def write(self) -> None:
        """A file of that name stays until this one is whole. Errors: ConfigError, UnavailableError."""
        content = {"traceEvents": self._events, "displayTimeUnit": "ms"}
        with open_output(self._path, flag="trace file") as output:
            output.write(json.dumps(content, separators=(",", ":")))

    def _process(self, name: str) -> int:
        if name not in self._process_ids:
            process_id = self._process_ids[name] = len(self._process_ids) + 1
            self._events.append(_metadata("process_name", process_id, {"name": name}))
            self._events.append(_metadata("process_sort_index", process_id, {"sort_index": process_id}))
        return self._process_ids[name]


def _event(span: Span, process_id: int) -> dict[str, Any]:
    event: dict[str, Any] = {
        "name": span.name,
        "ph": "X",
        "ts": span.start_ns / 1e3,
        "dur": span.duration_ns / 1e3,
        "pid": process_id,
        "tid": 1,
    }
    return event if span.step is None else event | {"args": {"step": span.step}}


def _metadata(name: str, process_id: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process_id, "args": args}


def clock_offset_ns(ask: Callable[[], int], clock: Callable[[], int] = time.monotonic_ns) -> int:
    """How far another node's monotonic clock is ahead of this one; wrong by half a round trip at most.

    The fastest of a few questions is taken: the other side answered in the middle of it.
    """
    answers = []
    for _ in range(_NUM_ASKS):
        asked_at = clock()
        there = ask()
        back_at = clock()
        answers.append((back_at - asked_at, there - (asked_at + back_at) // 2))
    return min(answers)[1]


def on_one_clock(spans: Sequence[Span], offset_ns: int) -> list[Span]:
    return [span._replace(start_ns=span.start_ns - offset_ns) for span in spans]
