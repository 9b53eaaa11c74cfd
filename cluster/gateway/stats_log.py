"""A line of statistics in the log every INTERVAL_S, while there is anything to tell."""

import asyncio
import logging
import time

from actors.stats import GroupStats
from cluster.answering.group import Group, Groups

INTERVAL_S = 10.0
logger = logging.getLogger("latentray.stats")


async def log_stats(groups: Groups) -> None:
    """Of each group, for as long as the server runs."""
    await asyncio.gather(
        *(
            _log_group(group, f"group {number}: " if len(groups) > 1 else "")
            for number, group in enumerate(groups)
        )
    )


async def _log_group(group: Group, prefix: str) -> None:
    before, before_s = group.stats, time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now, now_s = group.stats, time.monotonic()
        if now is not None and (line := stats_line(now, before, now_s - before_s)) is not None:
            logger.info("%s%s", prefix, line)
        before, before_s = now, now_s


def stats_line(now: GroupStats, before: GroupStats | None, seconds: float) -> str | None:
    """The state now and the rates since `before`; None for a group that has been idle since then."""
    if before is None or before.num_steps > now.num_steps:  # its first figures, or a coordinator started anew
        before = GroupStats(proposed=(0,) * len(now.proposed), accepted=(0,) * len(now.accepted))
    if now.num_steps == before.num_steps and not now.running and not now.waiting:
        return None
    parts = [
        f"{now.running} running, {now.waiting} waiting",
        f"{(now.num_prompt_tokens - before.num_prompt_tokens) / seconds:.1f} prompt tokens/s",
        f"{(now.num_generated_tokens - before.num_generated_tokens) / seconds:.1f} generated tokens/s",
        f"KV blocks {now.num_used_blocks} of {now.num_kv_blocks}",
    ]
    if queries := now.num_cache_queries - before.num_cache_queries:
        parts.append(f"prefix cache {(now.num_cache_hits - before.num_cache_hits) / queries:.0%}")
    if verifies := now.num_verifies - before.num_verifies:
        accepted = sum(now.accepted) - sum(before.accepted)
        parts.append(f"{1 + accepted / verifies:.2f} tokens per verify")
    if preemptions := now.num_preemptions - before.num_preemptions:
        parts.append(f"{preemptions} preemptions")
    return ", ".join(parts)
