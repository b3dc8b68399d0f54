"""Which leading blocks each instance's KV cache holds: one table for the fleet, one order of use per instance.

Block hashes are chained (hash i covers blocks 0..i, model and tenant included), so a block's hash names its whole
prefix and a flat table finds what a radix tree would, without nodes to split or merge. The table maps a hash to the
set of instances that hold it, as bits; one walk over a prompt's hashes gives the match length on every instance.

An instance's entries come from two sources.
- *Approximate*, the default: what was dispatched there, least recently used forgotten first beyond the engine's own
  capacity. Entries may be stale, which costs a wrong estimate and nothing else.
- *Precise*, from its first KV event on: what the engine says it stored and removed. Dispatches then only add a short
  list of blocks that are expected soon, so that a burst with a common prefix is seen before the engine reports it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from weighbridge.core.instance import Limits

Hash = Any
"""A block's hash, an integer. Not written so, because compiled code keeps an integer as a bare number and would have to
make an object of it again for every look into a table."""
DEFAULT_BLOCKS = 65_536
"""Kept of an instance whose capacity is not known."""
PENDING_BLOCKS = 4_096
"""Blocks that a precise index expects but has not been told of."""


def index_blocks(limits: Limits) -> int:
    """How many blocks to keep of an instance: about what its cache can hold, none if it has none."""
    if not limits.prefix_caching:
        return 0
    capacity = limits.kv_tokens
    return DEFAULT_BLOCKS if capacity is None else max(capacity // 16, 1)


class PrefixIndex:
    """Content of one instance's prefix cache. `holders` is the fleet's table and `bit` this instance's place in it."""

    __slots__ = ("_bit", "_blocks", "_holders", "_pending", "capacity_blocks", "precise")

    def __init__(self, capacity_blocks: int, holders: dict[Hash, int] | None = None, bit: int = 0) -> None:
        self.capacity_blocks = max(capacity_blocks, 0)
        self.precise = False
        self._holders = {} if holders is None else holders
        self._bit = 1 << bit
        self._blocks: OrderedDict[Hash, None] = OrderedDict()
        self._pending: OrderedDict[Hash, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks) + len(self._pending)

    def match(self, hashes: Sequence[Hash]) -> int:
        """Number of leading blocks that are present. O(matched blocks); changes nothing."""
        holders, bit = self._holders, self._bit
        count = 0
        for block in hashes:
            if not holders.get(block, 0) & bit:
                break
            count += 1
        return count

    def insert(self, hashes: Sequence[Hash]) -> None:
        """Note that the instance is about to compute or use these blocks.

        Touched from the last to the first, so that under pressure the tail of a chain goes before its head.
        """
        if self.precise:
            known = self._blocks
            self._add(self._pending, [h for h in hashes if h not in known], PENDING_BLOCKS)
        else:
            self._add(self._blocks, hashes, self.capacity_blocks)

    def stored(self, hashes: Sequence[Hash]) -> None:
        """The engine says that it holds these blocks now."""
        if not self.precise:
            self.clear()
            self.precise = True
        for block in hashes:
            self._pending.pop(block, None)
        self._add(self._blocks, hashes, self.capacity_blocks + self.capacity_blocks // 4)

    def removed(self, hashes: Iterable[Hash]) -> None:
        """The engine says that it holds these blocks no more."""
        for block in hashes:
            known = self._blocks.pop(block, 0) is None
            expected = self._pending.pop(block, 0) is None
            if known or expected:
                self._forget(block)

    def clear(self) -> None:
        """Forget everything: the instance restarted, or said that it cleared its cache."""
        for blocks in (self._blocks, self._pending):
            for block in blocks:
                self._forget(block)
            blocks.clear()

    def _add(self, blocks: OrderedDict[Hash, None], hashes: Sequence[Hash], most: int) -> None:
        holders, bit = self._holders, self._bit
        for block in reversed(hashes):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
                holders[block] = holders.get(block, 0) | bit
        while len(blocks) > most:
            self._forget(blocks.popitem(last=False)[0])

    def _forget(self, block: Hash) -> None:
        left = self._holders.get(block, 0) & ~self._bit
        if left:
            self._holders[block] = left
        else:
            self._holders.pop(block, None)


def match_all(holders: dict[Hash, int], hashes: Sequence[Hash], everyone: int) -> dict[int, int]:
    """Matched leading blocks by instance place, for those in the bit set `everyone` that match at all.

    One walk: O(prefix blocks + instances that match).
    """
    depths: dict[int, int] = {}
    depth, left = 0, everyone
    for block in hashes:
        still = holders.get(block, 0) & left
        if still != left:
            if depth:
                _note(depths, left & ~still, depth)
            left = still
            if not left:
                return depths
        depth += 1
    if depth:
        _note(depths, left, depth)
    return depths


def _note(depths: dict[int, int], places: int, depth: int) -> None:
    while places:
        low = places & -places
        depths[low.bit_length() - 1] = depth
        places ^= low
