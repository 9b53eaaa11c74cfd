"""How a group is doing: a snapshot that travels with heartbeats. Totals count from its start."""

from collections import defaultdict
from collections.abc import Iterable

import msgspec

MAX_QUEUE_PARTS = 256
"""Tenants and priorities are the clients' words: of more of them a heartbeat tells together."""


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the finished requests spent, all together."""

    num_finished: int = 0
    queue_s: float = 0.0
    """Until the first admission."""
    prefill_s: float = 0.0
    """From there to the first token."""
    decode_s: float = 0.0
    """From there to the end."""


class QueuePart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Requests that wait, of one tenant and priority."""

    tenant: str = ""
    priority: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    """What they have so far, to be computed before their next token."""


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of one coordinator."""

    num_slots: int = 0
    """Requests that can run at once."""
    running: int = 0
    """Requests with a state slot."""
    waiting: int = 0
    """Requests without one: not yet admitted, or preempted."""
    num_used_blocks: int = 0
    num_kv_blocks: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of accepted requests."""
    num_generated_tokens: int = 0
    """Tokens committed (what the streams carried)."""
    num_verifies: int = 0
    proposed: tuple[int, ...] = ()
    """Drafts proposed at positions 1..num_speculative_tokens."""
    accepted: tuple[int, ...] = ()
    """Of these, accepted - counted before a stop cuts the run."""
    last_k: tuple[int, ...] = ()
    """Of the newest step with verifies: how many proposed 0, 1, 2, ... drafts."""
    num_cache_queries: int = 0
    """Tokens looked up in the prefix cache: what admissions had committed."""
    num_cache_hits: int = 0
    """Of these, found there."""
    phases: PhaseTimes = PhaseTimes()
    num_steps: int = 0
    num_rows: int = 0
    """Rows of all steps: anchors, drafts and chunks."""
    schedule_s: float = 0.0
    """Time spent choosing steps."""
    step_s: float = 0.0
    """Time from a step's choice to its report."""
    process_s: float = 0.0
    """Time spent on reports."""
    step_age_s: float = 0.0
    """How long the oldest step in flight runs; 0 without one."""
    num_dropped_messages: int = 0
    """Messages on the step and request channels that could not be read, or answered nothing."""
    epoch: int = 0
    """Which set of shards works: 0 for the first, one more after each loss of a shard or coordinator."""
    num_restarts: int = 0
    """How often shards were lost and started again."""
    queue: tuple[QueuePart, ...] = ()
    """What waits, in a bounded number of parts: see `queue_parts`."""
    num_front_ends: int = 1
    """Gateways and other programs that are connected to the coordinator."""

    @property
    def tokens_per_verify(self) -> float:
        """Mean tokens that a verify emits before stops; 0 without verifies."""
        return 1 + sum(self.accepted) / self.num_verifies if self.num_verifies else 0.0

    @property
    def cache_hit_rate(self) -> float:
        return self.num_cache_hits / self.num_cache_queries if self.num_cache_queries else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By draft position: accepted / proposed (0 where none was proposed)."""
        return tuple(a / p if p else 0.0 for a, p in zip(self.accepted, self.proposed, strict=True))


def queue_parts(waiting: Iterable[tuple[str, int, int]]) -> tuple[QueuePart, ...]:
    """Parts of what waits, the largest first. waiting: tenant, priority and tokens of each request.

    What is beyond MAX_QUEUE_PARTS is one part of no tenant, and of the first of their priorities.
    """
    counts: defaultdict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for tenant, priority, num_tokens in waiting:
        count = counts[tenant, priority]
        count[0] += 1
        count[1] += num_tokens
    parts = [
        QueuePart(tenant=tenant, priority=priority, num_requests=num, num_tokens=num_tokens)
        for (tenant, priority), (num, num_tokens) in counts.items()
    ]
    parts.sort(key=lambda part: -part.num_requests)
    rest = parts[MAX_QUEUE_PARTS - 1 :] if len(parts) > MAX_QUEUE_PARTS else []
    if not rest:
        return tuple(parts)
    together = QueuePart(
        priority=min(part.priority for part in rest),
        num_requests=sum(part.num_requests for part in rest),
        num_tokens=sum(part.num_tokens for part in rest),
    )
    return (*parts[: MAX_QUEUE_PARTS - 1], together)
