"""KV memory of one engine in blocks: counts, and sharing of full blocks by content hash.

No block has an address here: a simulator needs counts and an engine with per-sequence streams has its own layout.
Blocks that nothing references but whose content is known stay cached and are evicted least recently used first.
"""

from __future__ import annotations

from weighbridge.scheduling.sequence import Sequence


class BlockManager:
    """Accounts for `blocks` blocks of `block_tokens` tokens.

    Invariants: `0 <= free_blocks <= blocks`; a cached block is referenced by at least one sequence or idle, never
    both; idle blocks count as free. A sequence's blocks are `seq.blocks`, of which `seq.held_hashes` are shareable.
    """

    __slots__ = ("_idle", "_refs", "block_tokens", "blocks", "evicted_blocks", "free_blocks", "prefix_caching")

    def __init__(self, blocks: int, block_tokens: int = 16, *, prefix_caching: bool = False) -> None:
        if blocks < 1 or block_tokens < 1:
            raise ValueError("blocks and block_tokens must be at least 1")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.prefix_caching = prefix_caching
        self.free_blocks = blocks
        self.evicted_blocks = 0
        self._refs: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # insertion order is eviction order

    @property
    def used_blocks(self) -> int:
        """Blocks that some sequence references."""
        return self.blocks - self.free_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks whose content can be matched, referenced or idle."""
        return len(self._refs) + len(self._idle)

    def matched_blocks(self, seq: Sequence) -> int:
        """Leading blocks of the sequence that are cached, leaving at least one token to compute."""
        if not self.prefix_caching or seq.block_hashes is None:
            return 0
        limit = min(len(seq.block_hashes), (seq.total_tokens - 1) // self.block_tokens)
        hits = 0
        while hits < limit and (seq.block_hashes[hits] in self._refs or seq.block_hashes[hits] in self._idle):
            hits += 1
        return hits

    def has_room(self, seq: Sequence, tokens: int) -> bool:
        """Whether the first `tokens` tokens of a sequence that holds no block would fit now, cached blocks included."""
        hits = self.matched_blocks(seq)
        hashes = seq.block_hashes or ()
        revived = sum(1 for i in range(hits) if hashes[i] in self._idle)
        return -(-tokens // self.block_tokens) - hits + revived <= self.free_blocks

    def admit(self, seq: Sequence, tokens: int) -> bool:
        """Take cached blocks and room for `tokens` more tokens; sets `computed_tokens` to the hit. All or nothing.

        The sequence must hold no block.
        """
        hits = self.matched_blocks(seq)
        computed = hits * self.block_tokens
        tokens = min(tokens, seq.total_tokens - computed)
        need = -(-(computed + tokens) // self.block_tokens) - hits
        hashes = seq.block_hashes
        revived = sum(1 for i in range(hits) if hashes is not None and hashes[i] in self._idle)
        if need + revived > self.free_blocks:
            return False
        if hits and hashes is not None:
            for value in hashes[:hits]:
                if value in self._idle:
                    del self._idle[value]
                    self._refs[value] = 1
                    self.free_blocks -= 1
                else:
                    self._refs[value] += 1
                seq.held_hashes.append(value)
            seq.blocks = hits
            seq.computed_tokens = computed
        return self.grow(seq, computed + tokens)

    def grow(self, seq: Sequence, tokens: int) -> bool:
        """Make room for the sequence's first `tokens` tokens; False, and nothing changed, when blocks lack."""
        need = -(-tokens // self.block_tokens) - seq.blocks
        if need > 0:
            if need > self.free_blocks:
                return False
            self.free_blocks -= need
            seq.blocks += need
            while len(self._idle) > self.free_blocks:
                del self._idle[next(iter(self._idle))]
                self.evicted_blocks += 1
        if self.prefix_caching and seq.block_hashes is not None:
            self._register(seq, tokens)
        return True

    def _register(self, seq: Sequence, tokens: int) -> None:
        """Name the blocks that fill up with this step, so that later sequences match them.

        A block whose content another sequence has already cached stays private: engines keep both copies too.
        """
        hashes = seq.block_hashes
        assert hashes is not None
        for index in range(seq.computed_tokens // self.block_tokens, min(tokens // self.block_tokens, len(hashes))):
            value = hashes[index]
            if value in self._refs or value in self._idle:
                continue
            self._refs[value] = 1
            seq.held_hashes.append(value)

    def release(self, seq: Sequence) -> None:
        """Give back all that the sequence holds; shareable blocks become idle, tail blocks first to be evicted."""
        private = seq.blocks - len(seq.held_hashes)
        for value in reversed(seq.held_hashes):
            count = self._refs[value] - 1
            if count:
                self._refs[value] = count
            else:
                del self._refs[value]
                self._idle[value] = None
                private += 1
        self.free_blocks += private
        seq.held_hashes = []
        seq.blocks = 0

    def clear(self) -> None:
        """Forget all idle content; blocks in use keep theirs."""
        self._idle.clear()
