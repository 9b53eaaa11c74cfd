"""What `latentray status` makes of a group's statistics."""

from actors.stats import GroupStats, PhaseTimes
from cluster.cli.group_figures import figures

EARLIER = GroupStats(
    running=1,
    num_kv_blocks=64,
    num_generated_tokens=100,
    num_verifies=50,
    proposed=(50, 40, 30),
    accepted=(40, 20, 10),
    num_steps=60,
    step_s=0.6,
    phases=PhaseTimes(num_finished=2, queue_s=1.0, prefill_s=1.0, decode_s=1.0),
)
NOW = GroupStats(
    running=3,
    waiting=2,
    num_used_blocks=10,
    num_kv_blocks=64,
    num_preemptions=1,
    num_generated_tokens=130,
    num_verifies=70,
    proposed=(60, 40, 30),
    accepted=(45, 20, 10),
    last_k=(1, 0, 2),
    num_cache_queries=200,
    num_cache_hits=50,
    num_steps=80,
    step_s=1.0,
    schedule_s=0.01,
    phases=PhaseTimes(num_finished=4, queue_s=1.5, prefill_s=1.1, decode_s=5.0),
)


def test_of_the_whole_life() -> None:
    shown = dict(figures(NOW))
    assert shown["requests"] == "3 running, 2 waiting, 4 finished"
    assert shown["KV blocks"] == "10 of 64 in use"
    assert shown["drafts accepted"] == "75%, 50%, 33%"
    assert shown["tokens per verify"] == "2.07"
    assert shown["prefix cache"] == "50 of 200 tokens found (25%)"
    assert shown["drafts now"] == "1 x 0, 2 x 2"
    assert shown["step, mean"].startswith("12.50 ms")


def test_of_the_time_since_a_snapshot() -> None:
    shown = dict(figures(NOW, EARLIER))
    assert shown["tokens"] == "0 prompt, 30 generated"
    assert shown["drafts accepted"] == "50%, none yet, none yet"
    assert shown["tokens per verify"] == "1.25"
    assert shown["step, mean"].startswith("20.00 ms")
    assert shown["request, mean"] == "queued 250.00 ms, prefill 50.00 ms, decode 2000.00 ms"


def test_a_restarted_or_idle_group() -> None:
    assert figures(EARLIER, NOW) == figures(EARLIER)
    shown = dict(figures(GroupStats()))
    assert (shown["tokens per verify"], shown["step, mean"].split(" (")[0]) == ("none yet", "none yet")
