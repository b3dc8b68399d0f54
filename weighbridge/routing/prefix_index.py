"""Which leading blocks an instance's KV cache probably holds, learned from what was sent there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Approximate content of one instance's prefix cache: block hashes in least-recently-used order.

    Hashes are chained (hash i covers blocks 0..i), so a set is enough and the first miss ends a match. The index
    holds at most `capacity_blocks` and forgets the least recently used first, as an LRU cache would; entries may be
    stale where the engine evicts otherwise, which costs a wrong estimate and nothing else.
    """

    __slots__ = ("_blocks", "capacity_blocks")

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = max(capacity_blocks, 0)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, hashes: Sequence[int]) -> int:
        """Number of leading blocks that are present. O(matched blocks); changes nothing."""
        blocks = self._blocks
        count = 0
        for block in hashes:
            if block not in blocks:
                break
            count += 1
        return count

    def insert(self, hashes: Sequence[int]) -> None:
        """Note that the instance has just computed or used these blocks.

        Touched from the last to the first, so that under pressure the tail of a chain goes before its head.
        """
        blocks = self._blocks
        for block in reversed(hashes):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
        while len(blocks) > self.capacity_blocks:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the instance restarted."""
        self._blocks.clear()
