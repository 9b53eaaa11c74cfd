"""The trace file, and what it shows of deferred mode."""

import itertools
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from cluster.answering.engine import start_engine
from cluster.report.trace import TraceFile, clock_offset_ns, on_one_clock
from kernels_integration.errors import ConfigError, UnavailableError
from kernels_integration.spans import Span
from tests.support.groups import group_config, load_tokenizer, request, text_prompts

Event = dict[str, Any]


def events_of(path: Path) -> dict[str, list[Event]]:
    """Complete events by process name, as a viewer groups them."""
    content = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "process_name"}
    events: dict[str, list[Event]] = {name: [] for name in names.values()}
    for event in content["traceEvents"]:
        if event["ph"] == "X":
            assert {"name", "ts", "dur", "pid", "tid"} <= event.keys()
            assert event["dur"] >= 0
            events[names[event["pid"]]].append(event)
    return events


def by_step(events: list[Event], name: str) -> dict[int, Event]:
    return {e["args"]["step"]: e for e in events if e["name"] == name}


def traced_run(path: Path, scheduling: str, *, tp: int = 1) -> dict[str, list[Event]]:
    config = group_config(
        scheduling=scheduling, trace=True, num_speculative_tokens=2, tensor_parallel_size=tp
    )
    engine = start_engine(config, executor="inline", tokenizer=load_tokenizer(), trace_file=str(path))
    assert list(engine.run([request("r", text_prompts([40])[0], max_tokens=24)]))
    engine.close()
    return events_of(path)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_deferred_mode_chooses_a_step_while_the_shards_run_the_one_before(tmp_path: Path, tp: int) -> None:
    events = traced_run(tmp_path / "trace.json", "deferred", tp=tp)
    assert list(events) == ["coordinator", *(f"shard {rank}" for rank in range(tp))]
    chosen, run = by_step(events["coordinator"], "schedule"), by_step(events["shard 0"], "step")
    sent = by_step(events["coordinator"], "send")
    assert len(run) > 5
    followed = [n for n in run if n + 1 in sent]
    for n in followed:
        assert chosen[n + 1]["ts"] + chosen[n + 1]["dur"] <= sent[n + 1]["ts"]
    # It waits at the shards before they have ended step n; a thread may lose its turn on a busy machine.
    in_time = [n for n in followed if sent[n + 1]["ts"] < run[n]["ts"] + run[n]["dur"]]
    assert len(in_time) > 0.7 * len(followed)
    # All but the first are chosen, and their predecessor's predecessor's report read, while the shards work.
    busy = [(e["ts"], e["ts"] + e["dur"]) for e in run.values()]
    later = [e for n, e in chosen.items() if 2 < n <= max(run)]
    inside = [e for e in later if any(start < e["ts"] < end for start, end in busy)]
    assert len(inside) > 0.8 * len(later)
    for name in ("draft", "verify", "sampling"):
        assert any(e["name"] == name for e in events["shard 0"])


def test_sync_mode_does_not(tmp_path: Path) -> None:
    events = traced_run(tmp_path / "trace.json", "sync")
    chosen, processed = (by_step(events["coordinator"], name) for name in ("schedule", "process"))
    assert len(processed) > 5
    for n in processed:
        if n + 1 in chosen:
            assert chosen[n + 1]["ts"] >= processed[n]["ts"] + processed[n]["dur"]


def test_actors_of_several_groups_are_processes_of_their_own(tmp_path: Path) -> None:
    file = TraceFile(str(tmp_path / "t.json"))
    trace = {"coordinator": [Span("idle", 5_000, 2_000)], "shard 0": [Span("step", 6_000, 500, 3)]}
    for group in ("0 drafts", "3 drafts"):
        file.add(trace, group)
    file.add({"coordinator": [Span("idle", 9_000, 1)]}, "0 drafts")
    file.write()
    events = events_of(tmp_path / "t.json")
    assert list(events) == [
        "0 drafts coordinator",
        "0 drafts shard 0",
        "3 drafts coordinator",
        "3 drafts shard 0",
    ]
    assert [e["ts"] for e in events["0 drafts coordinator"]] == [5.0, 9.0]
    [step] = events["3 drafts shard 0"]
    assert (step["ts"], step["dur"], step["args"]) == (6.0, 0.5, {"step": 3})


def test_a_file_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be written"):
        TraceFile(str(tmp_path / "nowhere" / "t.json"))


def test_another_nodes_clock() -> None:
    """Answers take 2 to 9 ticks each way; the fastest tells the offset best."""
    now = itertools.count(1000)
    delays = iter([9, 2, 5, 7, 4])

    def clock() -> int:
        return next(now)

    def ask() -> int:
        delay = next(delays)
        for _ in range(delay):
            there = next(now) + 500_000
        for _ in range(2 * delay):  # the way back is slower
            next(now)
        return there

    offset = clock_offset_ns(ask, clock)
    assert abs(offset - 500_000) <= 2
    assert on_one_clock([Span("a", 500_100, 3, 1)], 500_000) == [Span("a", 100, 3, 1)]


def test_an_earlier_trace_stays_until_a_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("earlier")
    file = TraceFile(str(path))
    assert path.read_text() == "earlier", "the run may still fail to start"
    file.add({"coordinator": []})
    file.write()
    assert json.loads(path.read_text())["traceEvents"]
    TraceFile(str(tmp_path / "other.json"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.json"]


def test_a_trace_may_go_to_a_device_and_says_when_it_cannot() -> None:
    TraceFile("/dev/null").write()
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(UnavailableError, match="trace file /dev/full takes no more: No space left"):
        TraceFile("/dev/full").write()
