"""How a group is doing: a snapshot that travels with heartbeats. Totals count from its start."""

import msgspec


class PhaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the finished requests spent, all together."""

    num_finished: int = 0
    queue_s: float = 0.0
    """Until the first admission."""
    prefill_s: float = 0.0
    """From there to the first token."""
    decode_s: float = 0.0
    """From there to the end."""


class GroupStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of one coordinator."""

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
