"""How much KV the requests running on one instance share: a block that several of them begin with is held once.

Block hashes are chained, so the running prompts form a trie whose nodes are their hashes. Each node counts its
children and the prompts that end there; a prompt that joins or leaves walks from its last block towards the first and
stops at the first block that others hold as well: O(blocks of its own), not O(blocks).
"""

from __future__ import annotations

from collections.abc import Sequence

from weighbridge.routing.prefix_index import Hash


class SharedKv:
    """The blocks of the running prompts. `tokens` is what would be counted twice by adding the prompts up."""

    __slots__ = ("_uses", "tokens")

    def __init__(self) -> None:
        self._uses: dict[Hash, int] = {}
        self.tokens = 0

    def add(self, hashes: Sequence[Hash], block_tokens: int) -> None:
        """A prompt with these blocks runs now."""
        uses = self._uses
        own = 0
        for block in reversed(hashes):
            count = uses.get(block, 0)
            uses[block] = count + 1
            if count:
                break
            own += 1
        self.tokens += (len(hashes) - own) * block_tokens

    def remove(self, hashes: Sequence[Hash], block_tokens: int) -> None:
        """A prompt that was added runs no more."""
        uses = self._uses
        own = 0
        for block in reversed(hashes):
            count = uses[block] - 1
            if count:
                uses[block] = count
                break
            del uses[block]
            own += 1
        self.tokens -= (len(hashes) - own) * block_tokens

    def clear(self) -> None:
        """The instance restarted."""
        self._uses.clear()
        self.tokens = 0
