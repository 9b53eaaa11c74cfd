"""Which request owns which KV block."""

from collections import deque


class BlockManager:
    """Free list and block tables. One entry covers `tokens_per_block` global tokens on all DCP ranks.

    Tables belong to an admission number, never to a request id: a request that comes back gets a new
    table. Blocks are handed out in the order in which they became free (a prefix cache evicts in that order).
    A freed block may be handed out for the very next message: shards apply messages in step order.
    """

    def __init__(self, *, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._free: deque[int] = deque(range(num_blocks))
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """Table entries that cover positions 0..num_tokens-1."""
        return -(-num_tokens // self.tokens_per_block)

    def open(self, admission: int) -> None:
        """An empty table for a new admission."""
        assert admission not in self._tables
        self._tables[admission] = []

    def table(self, admission: int) -> tuple[int, ...]:
        return tuple(self._tables[admission])

    def reserved_tokens(self, admission: int) -> int:
        """Tokens that the table covers now."""
        return len(self._tables[admission]) * self.tokens_per_block

    def reservable_tokens(self, admission: int) -> int:
        """Tokens that the table would cover with every free block."""
        return (len(self._tables[admission]) + len(self._free)) * self.tokens_per_block

    def reserve(self, admission: int, num_tokens: int) -> list[int]:
        """Let the table cover positions 0..num_tokens-1; the blocks added, in order.

        The caller has checked `reservable_tokens`.
        """
        table = self._tables[admission]
        missing = self.blocks_for(num_tokens) - len(table)
        assert missing <= len(self._free), (missing, len(self._free))
        added = [self._free.popleft() for _ in range(missing)]
        table.extend(added)
        return added

    def release(self, admission: int) -> None:
        """Give the whole table back, its end first: a prompt's beginning is best kept longest."""
        self._free.extend(reversed(self._tables.pop(admission)))
