"""Which requests hold which KV block, and which blocks hold tokens that others may use again."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence


class BlockManager:
    """Block tables, free blocks and published blocks. One block covers `tokens_per_block` global tokens on
    all DCP ranks.

    Tables belong to an admission number, never to a request id: a request that comes back gets a new
    table. A freed block may be handed out for the very next message: shards apply messages in step order.

    A *published* block is complete and known by the hash of all tokens up to its end. Any number of tables
    hold it; it is never written again. When no table holds it, it is free but keeps its content until
    every blank block is taken; then the least recently used goes first.
    """

    def __init__(self, *, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self._blank = deque(range(num_blocks))
        """Free, with nothing worth keeping."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Free and published; least recently used first."""
        self._num_holders = [0] * num_blocks
        self._tables: dict[int, list[int]] = {}
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Table entries that cover positions 0..num_tokens-1."""
        return -(-num_tokens // self.tokens_per_block)

    def published_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest beginning of `hashes` that is published as a whole."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_available(self, shared: Sequence[int]) -> int:
        """Free blocks that are left when a new table takes the published blocks `shared`."""
        return self.num_free - sum(self._num_holders[block] == 0 for block in shared)

    def num_held_alone(self, admission: int) -> int:
        """Blocks that would be free if this table were given back."""
        return sum(self._num_holders[block] == 1 for block in self._tables[admission])

    def open(self, admission: int, shared: Sequence[int] = ()) -> None:
        """A table for a new admission, which begins with these published blocks."""
        assert admission not in self._tables
        for block in shared:
            assert block in self._hash_of
            if self._num_holders[block] == 0:
                del self._kept[block]
            self._num_holders[block] += 1
        self._tables[admission] = list(shared)

    def table(self, admission: int) -> tuple[int, ...]:
        return tuple(self._tables[admission])

    def reserved_tokens(self, admission: int) -> int:
        """Tokens that the table covers now."""
        return len(self._tables[admission]) * self.tokens_per_block

    def reservable_tokens(self, admission: int) -> int:
        """Tokens that the table would cover with every free block."""
        return (len(self._tables[admission]) + self.num_free) * self.tokens_per_block

    def reserve(self, admission: int, num_tokens: int) -> list[int]:
        """Let the table cover positions 0..num_tokens-1; the blocks added, in order.

        The caller has checked `reservable_tokens`.
        """
        table = self._tables[admission]
        missing = self.blocks_for(num_tokens) - len(table)
        assert missing <= self.num_free, (missing, self.num_free)
        added = [self._take() for _ in range(missing)]
        table.extend(added)
        return added

    def publish(self, admission: int, index: int, block_hash: bytes) -> None:
        """The table's block `index` is complete and will not be written again.

        If another block with this hash was first, that one serves and this one stays private.
        """
        block = self._tables[admission][index]
        if block_hash not in self._block_of:
            assert block not in self._hash_of
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget_published(self) -> None:
        """The shards lost their KV. No table may be open."""
        assert not self._tables
        self._blank.extend(self._kept)
        self._kept.clear()
        self._block_of.clear()
        self._hash_of.clear()

    def release(self, admission: int) -> None:
        """Give the whole table back, its end first: a prompt's beginning is best kept longest."""
        for block in reversed(self._tables.pop(admission)):
            self._num_holders[block] -= 1
            if self._num_holders[block] == 0:
                if block in self._hash_of:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def _take(self) -> int:
        if self._blank:
            block = self._blank.popleft()
        else:
            block, _ = self._kept.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._num_holders[block] = 1
        return block
