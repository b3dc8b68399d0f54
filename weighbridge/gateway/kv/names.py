"""Between two vocabularies: the Router's hashes of prompt *bytes*, and keys of *token* blocks. Pure, bounded.

The gateway does not tokenize on a request's way, so the Router knows a prompt by chained hashes of its bytes. Once the
tokens of a prompt are known, each of its byte blocks is given the token block in which it ends, by proportion: of a
text of B bytes and T tokens, byte e lies at token T * e / B. Chat templates make that inexact by some tokens, by the
same number for every prompt of one kind.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weighbridge.gateway.kv.blocks import Key

MAX_NAMES = 131_072
"""Byte blocks whose token block is remembered, at about 300 bytes each; beyond it the least recently learned go."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A prompt of `text_bytes` and `tokens`, in byte blocks and in token blocks."""

    count: int
    """Byte blocks that are known of it."""
    block_bytes: int
    text_bytes: int
    tokens: int
    block_tokens: int

    def place(self, block: int) -> int:
        """The index of the token block that holds the end of a byte block."""
        end = (block + 1) * self.block_bytes * self.tokens // max(self.text_bytes, 1)
        return max(-(-end // self.block_tokens) - 1, 0)

    def places(self) -> list[int]:
        """Of each byte block."""
        return [self.place(block) for block in range(self.count)]

    def whole(self) -> int:
        """How many leading byte blocks end before the last, partial token block, which no engine keeps. O(log)."""
        return bisect_left(range(self.count), self.tokens // self.block_tokens, key=self.place)


class Names:
    """Which byte blocks ("names", the Router's hashes) end in which token block."""

    def __init__(self, limit: int = MAX_NAMES) -> None:
        self._limit = limit
        self._keys: OrderedDict[int, Key] = OrderedDict()
        self._names: dict[Key, list[int]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def knows(self, name: int) -> bool:
        """Whether a byte block has its token block."""
        return name in self._keys

    def key(self, name: int) -> Key | None:
        """The token block in which a byte block ends, if known."""
        return self._keys.get(name)

    def of(self, keys: Iterable[Key]) -> list[int]:
        """All byte blocks that end in these token blocks."""
        names = self._names
        return [name for key in keys if key in names for name in names[key]]

    def held(self, held: Callable[[Key], bool]) -> list[int]:
        """All byte blocks whose token block is held."""
        return [name for name, key in self._keys.items() if held(key)]

    def learn(
        self, names: Sequence[int], keys: Sequence[Key], places: Sequence[int], held: Callable[[Key], bool]
    ) -> None:
        """A prompt's byte blocks `names` end in the token blocks `keys[place]`; places beyond `keys` are not kept.

        What was learned before stays while some engine holds that block: the proportion differs a little from prompt
        to prompt, and the last block of a shared beginning must not wander into the part that is not shared.
        """
        for name, place in zip(names, places, strict=True):
            if place >= len(keys):
                break
            key, known = keys[place], self._keys.get(name)
            if known is not None:
                self._keys.move_to_end(name)
                if known == key or held(known):
                    continue
                self._unlink(name, known)
            self._keys[name] = key
            self._names.setdefault(key, []).append(name)
        while len(self._keys) > self._limit:
            self._unlink(*self._keys.popitem(last=False))

    def _unlink(self, name: int, key: Key) -> None:
        left = self._names[key]
        left.remove(name)
        if not left:
            del self._names[key]
