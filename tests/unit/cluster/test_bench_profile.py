"""Rows of a profile: times add up to the step, work is a step's, limits are the nearer of two."""

import pytest

from actors.stats import GroupStats
from cluster.bench.profile import MachineLimits, ProfileRow, profile_rows
from kernels_integration.spans import Span


def test_rows_add_up_to_the_step() -> None:
    spans = []
    for step in range(2):
        start = step * 1000
        spans += [
            Span("op linear 8 -> 6", start + 20, 30, num_bytes=600, num_flops=90),
            Span("attention", start + 10, 50),
            Span("op linear 8 -> 6", start + 65, 15, num_bytes=400, num_flops=10),
            Span("verify", start + 5, 90),
            Span("report", start + 95, 3),
            Span("step", start, 100),
        ]
    before = GroupStats(num_steps=5)
    after = GroupStats(num_steps=7, step_s=300e-9)
    rows = {row.name: row for row in profile_rows(spans, before, after)}
    linear = rows["linear 8 -> 6"]
    assert (linear.calls, linear.num_bytes, linear.num_flops) == (2, 1000, 100)
    seconds = {name: round(row.seconds * 1e9) for name, row in rows.items() if row.seconds}
    assert seconds == {
        "linear 8 -> 6": 45,
        "other of verify": 25,
        "around attention": 20,
        "other of step": 7,
        "around report": 3,
        "messages": 55,  # 150 from choice to report, of which the shard took 95
    }


def test_the_limit_is_the_slower_of_memory_and_arithmetic() -> None:
    limits = MachineLimits(dtype="float32", bytes_per_s=100.0, flops_per_s=1000.0)
    assert ProfileRow(name="a", seconds=4.0, num_bytes=200, num_flops=100).of_limit(limits) == pytest.approx(
        0.5
    )
    assert ProfileRow(name="b", seconds=4.0, num_bytes=2, num_flops=3000).of_limit(limits) == pytest.approx(
        0.75
    )
    assert ProfileRow(name="c", seconds=4.0).of_limit(limits) is None
