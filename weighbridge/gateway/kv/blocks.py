"""Which token blocks one engine's KV cache holds, kept from its events. Pure, bounded.

Engines' own block hashes cannot be computed here (their seeds and algorithms differ by release), so each block gets a
*key* of our own, a chained hash of its tokens; an engine hash only finds the key again when its block is removed.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Any

from weighbridge.gateway.kv.wire import Cleared, KvEvent, Removed, Stored

MAX_BLOCKS = 262_144
"""Blocks remembered of one engine, at about 300 bytes each; beyond it the oldest are forgotten."""

Key = bytes
Holders = frozenset[str]
"""Ranks and media that hold a block, as `rank/medium`; the few sets that occur are shared between blocks."""
NOBODY: Holders = frozenset()


def root_key(block_tokens: int, lora: str) -> Key:
    """Where chains begin: blocks of another size or adapter never match."""
    return blake2b(f"{block_tokens}/{lora}".encode(), digest_size=8).digest()


def block_key(parent: Key, tokens: Sequence[int], extra: str = "") -> Key:
    """The key of a block after its parent's."""
    return blake2b(parent + array("I", tokens).tobytes() + extra.encode(), digest_size=8).digest()


def chain_keys(tokens: Sequence[int], block_tokens: int, *, lora: str = "", salt: str = "") -> list[Key]:
    """The keys of a prompt's whole blocks."""
    key = root_key(block_tokens, lora)
    keys = []
    for start in range(0, len(tokens) // block_tokens * block_tokens, block_tokens):
        extra = _extra([salt], lora) if salt and start == 0 else ""
        key = block_key(key, tokens[start : start + block_tokens], extra)
        keys.append(key)
    return keys


def _extra(extra: Any, lora: str) -> str:
    """What distinguishes a block besides its tokens; the adapter is in the root already."""
    if not isinstance(extra, list):
        return ""
    values = [value for value in extra if not (lora and value == lora)]
    return repr(values) if values else ""


class Blocks:
    """The blocks of one engine. Each method returns the keys that came or went by it, in order."""

    def __init__(self, limit: int = MAX_BLOCKS) -> None:
        self.limit = limit
        self._keys: OrderedDict[Hashable, Key] = OrderedDict()
        self._holders: dict[Hashable, Holders] = {}
        self._sets: dict[Holders, Holders] = {}
        self._held: Counter[Key] = Counter()
        self.block_tokens = 0
        """As last stored; 0 before the first block."""
        self.loras: set[str] = set()
        self.orphans = 0
        """Blocks that could not be placed because their parent is not known."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def apply(self, event: KvEvent, rank: str = "0") -> tuple[list[Key], list[Key]]:
        """One event of a data-parallel rank: (keys held now that were not, keys held no more)."""
        if isinstance(event, Stored):
            return self._store(event, f"{rank}/{event.medium}")
        if isinstance(event, Removed):
            return [], self._remove(event.hashes, f"{rank}/{event.medium}" if event.medium else f"{rank}/")
        assert isinstance(event, Cleared)
        return [], self.clear(rank)

    def _store(self, event: Stored, holder: str) -> tuple[list[Key], list[Key]]:
        new: list[Key] = []
        size = event.block_tokens
        key: Key | None = root_key(size, event.lora) if event.parent is None else self._keys.get(event.parent)
        for at, value in enumerate(event.hashes):
            if value not in self._keys:
                if not event.tokens or key is None:
                    self.orphans += len(event.hashes) - at
                    break
                extra = _extra(event.extras[at], event.lora) if event.extras else ""
                self._keys[value] = block_key(key, event.tokens[at * size : (at + 1) * size], extra)
            key = self._keys[value]
            self._keys.move_to_end(value)
            holders = self._holders.get(value, NOBODY)
            if not holders:
                self._held[key] += 1
                if self._held[key] == 1:
                    new.append(key)
            if holder not in holders:
                self._holders[value] = self._shared(holders | {holder})
        if event.tokens and size:
            self.block_tokens = size
            if event.lora and len(self.loras) < 1000:
                self.loras.add(event.lora)
        gone: list[Key] = []
        while len(self._keys) > self.limit:
            gone += self._forget(next(iter(self._keys)))
        return new, gone

    def _remove(self, hashes: Iterable[Hashable], holder: str) -> list[Key]:
        gone: list[Key] = []
        for value in hashes:
            holders = self._holders.get(value)
            if holders is None:
                continue
            gone += self._let_go(value, holders, holder)
        return gone

    def _let_go(self, value: Hashable, holders: Holders, holder: str) -> list[Key]:
        """One holder has it no more; one that ends in "/" means a rank with all its media."""
        every = holder.endswith("/")
        left = frozenset(name for name in holders if not (name.startswith(holder) if every else name == holder))
        if not left:
            return self._forget(value)
        self._holders[value] = self._shared(left)
        return []

    def _shared(self, holders: Holders) -> Holders:
        if len(self._sets) > 1000:
            self._sets.clear()
        return self._sets.setdefault(holders, holders)

    def clear(self, rank: str | None = None) -> list[Key]:
        """A rank holds nothing any more, or (None) the engine is another process now."""
        gone: list[Key] = []
        for value, holders in list(self._holders.items()):
            gone += self._forget(value) if rank is None else self._let_go(value, holders, f"{rank}/")
        return gone

    def _forget(self, value: Hashable) -> list[Key]:
        key = self._keys.pop(value)
        if self._holders.pop(value, None) is None:
            return []
        self._held[key] -= 1
        if self._held[key]:
            return []
        del self._held[key]
        return [key]
