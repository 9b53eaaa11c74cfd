"""Where a step's time goes: the spans of rank 0 and the coordinator's own counters."""

from collections.abc import Iterable, Sequence

from actors.stats import GroupStats
from kernels_integration.spans import Span

PHASES = ("step", "draft", "verify", "prompt_fill")
"""Outer spans of a shard's step; what is inside them has names of its own."""


def self_times(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds by name, without the time of spans inside: the parts add up to the whole."""
    totals: dict[str, float] = {}
    open_spans: list[tuple[str, int]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.duration_ns)):
        end_ns = span.start_ns + span.duration_ns
        while open_spans and open_spans[-1][1] <= span.start_ns:
            open_spans.pop()
        if open_spans:
            totals[open_spans[-1][0]] -= span.duration_ns / 1e9
        totals[span.name] = totals.get(span.name, 0.0) + span.duration_ns / 1e9
        open_spans.append((span.name, end_ns))
    return totals


def step_breakdown(spans: Sequence[Span], before: GroupStats, after: GroupStats) -> list[tuple[str, float]]:
    """(part, seconds a step) of the steps between two snapshots, the longest first.

    "other of verify" is what that phase does outside the named parts inside it. "messages" is the time
    from a step's choice to its report that the shard did not spend on it: encoding, sockets, waking up.
    """
    num_steps = after.num_steps - before.num_steps
    if num_steps == 0:
        return []
    parts = {
        f"other of {name}" if name in PHASES else name: seconds for name, seconds in self_times(spans).items()
    }
    parts["coordinator"] = (after.schedule_s - before.schedule_s) + (after.process_s - before.process_s)
    parts["messages"] = (after.step_s - before.step_s) - _until_reports(spans)
    per_step = [(name, seconds / num_steps) for name, seconds in parts.items()]
    return sorted(per_step, key=lambda part: -part[1])


def _until_reports(spans: Iterable[Span]) -> float:
    """Seconds between the start of each step and its report."""
    starts = sorted(span.start_ns for span in spans if span.name == "step")
    reports = sorted(span.start_ns for span in spans if span.name == "report")
    return sum(report - start for start, report in zip(starts, reports, strict=True)) / 1e9
