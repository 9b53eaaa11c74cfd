"""A group's statistics as lines for people."""

from collections.abc import Sequence

from actors.stats import GroupStats

Figures = list[tuple[str, str]]


def figures(now: GroupStats, before: GroupStats | None = None) -> Figures:
    """Name and text. before: an earlier snapshot; totals and means are of the time since then."""
    start = before or GroupStats(proposed=(0,) * len(now.proposed), accepted=(0,) * len(now.accepted))
    if now.num_steps < start.num_steps:  # the group was started anew
        return figures(now)
    proposed, accepted = _minus(now.proposed, start.proposed), _minus(now.accepted, start.accepted)
    num_verifies = now.num_verifies - start.num_verifies
    num_steps = now.num_steps - start.num_steps
    queries, hits = (
        now.num_cache_queries - start.num_cache_queries,
        now.num_cache_hits - start.num_cache_hits,
    )
    phases, earlier = now.phases, start.phases
    num_finished = phases.num_finished - earlier.num_finished
    return [
        ("requests", f"{now.running} running, {now.waiting} waiting, {num_finished} finished"),
        ("KV blocks", f"{now.num_used_blocks} of {now.num_kv_blocks} in use"),
        ("restarts", f"{now.num_restarts - start.num_restarts}, now in epoch {now.epoch}"),
        ("preemptions", str(now.num_preemptions - start.num_preemptions)),
        (
            "tokens",
            f"{now.num_prompt_tokens - start.num_prompt_tokens} prompt, "
            f"{now.num_generated_tokens - start.num_generated_tokens} generated",
        ),
        ("prefix cache", f"{hits} of {queries} tokens found ({_percent(hits, queries)})"),
        ("tokens per verify", f"{1 + sum(accepted) / num_verifies:.2f}" if num_verifies else "none yet"),
        (
            "drafts accepted",
            ", ".join(_percent(a, p) for a, p in zip(accepted, proposed, strict=True)) or "none proposed",
        ),
        (
            "drafts now",
            ", ".join(f"{number} x {k}" for k, number in enumerate(now.last_k) if number) or "none yet",
        ),
        (
            "step, mean",
            f"{_ms(now.step_s - start.step_s, num_steps)} "
            f"(choosing it {_ms(now.schedule_s - start.schedule_s, num_steps)}, "
            f"its report {_ms(now.process_s - start.process_s, num_steps)})",
        ),
        (
            "request, mean",
            f"queued {_ms(phases.queue_s - earlier.queue_s, num_finished)}, "
            f"prefill {_ms(phases.prefill_s - earlier.prefill_s, num_finished)}, "
            f"decode {_ms(phases.decode_s - earlier.decode_s, num_finished)}",
        ),
    ]


def _minus(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(now, before, strict=True)]


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none yet"


def _ms(seconds: float, number: int) -> str:
    return f"{seconds / number * 1e3:.2f} ms" if number else "none yet"
