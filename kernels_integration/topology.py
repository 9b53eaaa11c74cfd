"""Who of a group holds what: ranks, DCP groups, and the shares of heads, widths, vocabulary and experts.

Without torch: settings are checked, reports made and blocks counted with it. Which rank holds a KV token is
`dcp`'s to say.
"""

from dataclasses import dataclass

from kernels_integration.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """`tp` ranks; each `dcp` neighbours of them divide a sequence's KV cache, `interleave` tokens in turn."""

    tp: int = 1
    dcp: int = 1
    interleave: int = 1
    expert_parallel: bool = False
    """Whole routed experts on each rank, instead of a part of each."""

    def check(self, *, num_heads: int) -> None:
        """Errors: ConfigError for more ranks than query heads, or a dcp that does not divide tp.

        Heads and vocabulary are padded and widths split unevenly where tp does not divide them.
        """
        if self.tp > num_heads:
            raise ConfigError(
                f"tensor-parallel-size {self.tp} is more than this model's num_attention_heads "
                f"{num_heads}, which leaves shards without a head; use {num_heads} or less"
            )
        if self.tp % self.dcp:
            raise ConfigError(
                f"decode-context-parallel-size {self.dcp} does not divide tensor-parallel-size {self.tp}; "
                f"use {_either(_divisors(self.tp))}"
            )

    def check_block_size(self, block_size: int) -> None:
        """Errors: ConfigError when a turn of the interleave would cross blocks."""
        if block_size % self.interleave:
            legal = ", ".join(map(str, _divisors(block_size)))
            raise ConfigError(
                f"cp-kv-cache-interleave-size {self.interleave} does not divide block-size {block_size}; "
                f"use one of {legal}, or another block size"
            )

    # Ranks

    @property
    def dcp_groups(self) -> tuple[range, ...]:
        """The ranks of each DCP group."""
        return tuple(range(first, first + self.dcp) for first in range(0, self.tp, self.dcp))

    def dcp_group(self, rank: int) -> int:
        """Which of dcp_groups the rank is in."""
        return rank // self.dcp

    def dcp_rank(self, rank: int) -> int:
        """Its place there."""
        return rank % self.dcp

    # Shares. Those of the last ranks may be smaller, empty, or padded: each says which.

    def heads(self, num_heads: int, rank: int) -> range:
        """Equally many on each rank; the last ones' may lie past the model's, and are padding."""
        share = -(-num_heads // self.tp)
        return range(rank * share, (rank + 1) * share)

    def attended_heads(self, num_heads: int) -> int:
        """Query heads of one attention call: a rank attends for all of its DCP group over its own KV."""
        return len(self.heads(num_heads, 0)) * self.dcp

    def vocabulary(self, vocab_size: int, rank: int) -> range:
        """Token ids whose logits the rank computes, as `heads`."""
        return self.heads(vocab_size, rank)

    def columns(self, width: int, rank: int) -> range:
        """Of a width that tp does not divide, some ranks hold one more than others, or none."""
        return range(width * rank // self.tp, width * (rank + 1) // self.tp)

    def experts(self, num_experts: int, rank: int) -> range:
        """The routed experts that the rank holds: neighbours, or all of which it holds a part."""
        return self.columns(num_experts, rank) if self.expert_parallel else range(num_experts)

    def tokens_per_block(self, block_size: int) -> int:
        """Global tokens that one block-table entry covers: it names a block on each rank of a DCP group."""
        return block_size * self.dcp


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _either(values: list[int]) -> str:
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last
