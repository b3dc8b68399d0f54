"""Shared prompt prefixes: trees of chained block hashes, and conversations whose turns extend one another."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """A 64-bit finaliser (the constants of splitmix64): equal in every process, unlike `hash`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def chain(parent: int, content: int) -> int:
    """The hash of a block with this content that follows the block `parent` (0 at the start of a prompt)."""
    return mix64(parent ^ mix64(content))


def extend(blocks: tuple[int, ...], count: int, content: int) -> tuple[int, ...]:
    """`blocks` followed by `count` blocks of content that only this number identifies."""
    last = blocks[-1] if blocks else 0
    tail = []
    for k in range(count):
        last = chain(last, content + k)
        tail.append(last)
    return blocks + tuple(tail)


@dataclass(frozen=True, slots=True)
class PrefixLevel:
    """One level of a prefix tree: every node has `fanout` children of `tokens` tokens each.

    Child k is drawn with weight 1 / (k + 1)^skew: 0 is uniform, 1 is Zipf's law.
    """

    fanout: int
    tokens: int
    skew: float = 0.0


class PrefixTree:
    """Draws shared prefixes: a system prompt, then a document below it, and so on, level by level."""

    def __init__(self, levels: tuple[PrefixLevel, ...], block_tokens: int = 16) -> None:
        if block_tokens < 1:
            raise ValueError("block_tokens must be at least 1")
        self.levels = levels
        self.block_tokens = block_tokens
        self._weights = [
            list(itertools.accumulate(1.0 / (k + 1) ** level.skew for k in range(level.fanout))) for level in levels
        ]
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def tokens(self) -> int:
        """Shared tokens of every prefix."""
        return sum(level.tokens for level in self.levels)

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """The chained hashes of the full blocks of one prefix; equal paths give equal hashes."""
        path = tuple(
            rng.choices(range(level.fanout), cum_weights=weights)[0]
            for level, weights in zip(self.levels, self._weights, strict=True)
        )
        return self.prefix(path)

    def prefix(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """The hashes of the prefix which takes child `path[k]` at level k."""
        known = self._known.get(path)
        if known is None:
            known = self._build(path)
            self._known[path] = known
        return known

    def _build(self, path: tuple[int, ...]) -> tuple[int, ...]:
        blocks: tuple[int, ...] = ()
        tokens, node = 0, 1
        for level, child in zip(self.levels, path, strict=True):
            node = mix64(node * 1_000_003 + child + 1)
            tokens += level.tokens
            # A block that straddles two levels belongs to the deeper one.
            blocks = extend(blocks, tokens // self.block_tokens - len(blocks), node)
        return blocks


@dataclass(slots=True)
class Conversation:
    """The growing history of one session, as blocks of its own content."""

    content: int
    block_tokens: int
    blocks: tuple[int, ...] = field(default=())
    tokens: int = 0

    def grow(self, tokens: int) -> tuple[int, ...]:
        """Append tokens; the hashes of all full blocks so far."""
        self.tokens += tokens
        full = self.tokens // self.block_tokens
        self.blocks = extend(self.blocks, full - len(self.blocks), mix64(self.content + len(self.blocks)))
        return self.blocks
