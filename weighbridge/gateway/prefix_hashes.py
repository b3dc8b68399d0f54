"""Hashes of a prompt's leading blocks, from its bytes alone: equal hashes, equal beginnings."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import Any

REMEMBERED = 64
"""Prompts whose hashes are kept. One takes at most 1,024 blocks of 64 bytes and their hashes, 100 KB."""
Hashes = tuple[Any, ...]
"""Integers; see `prefix_hashes` why they are not said to be."""


def prefix_hashes(seed: bytes, text: bytes, block_bytes: int, max_blocks: int, known: Hashes = ()) -> Hashes:
    """Chained CRC-32 of the whole leading blocks of `text`; `seed` (tenant, model) starts the chain and `known` are the
    hashes of its first blocks, where somebody has them already.

    Equal hash i means, up to a chance of 2^-32, equal first i + 1 blocks. A false match costs a wrong estimate of one
    request's cache hits and nothing else, so the quick hash that needs no dependency serves.
    """
    count = min(len(text) // block_bytes, max_blocks)
    crc = zlib.crc32
    # not `int`: compiled code would unpack each to a bare number and make a new object of it
    chain: Any = known[-1] if known else crc(seed)
    hashes = []
    for start in range(len(known) * block_bytes, count * block_bytes, block_bytes):
        chain = crc(text[start : start + block_bytes], chain)  # copying 64 bytes is quicker than a view of them
        hashes.append(chain)
    return (*known, *hashes)


class PrefixHasher:
    """Remembers, by how a prompt begins, the last one's hashes: of a conversation's next turn only what is new is
    hashed, and of a system prompt that many share, what comes after it."""

    __slots__ = ("_block_bytes", "_last", "_max_blocks")

    def __init__(self, block_bytes: int, max_blocks: int) -> None:
        self._block_bytes = block_bytes
        self._max_blocks = max_blocks
        self._last: OrderedDict[tuple[str, str, bytes], tuple[bytes, Hashes]] = OrderedDict()

    def hashes(self, tenant: str, model: str, text: bytes) -> Hashes:
        """What `prefix_hashes` says."""
        size = self._block_bytes
        count = min(len(text) // size, self._max_blocks)
        if not count:
            return ()
        key = (tenant, model, text[:size])
        last = self._last.get(key)
        same: Hashes = ()
        if last is not None:
            blocks, same = last
            if not text.startswith(blocks):
                same = same[: _equal_blocks(blocks, text, size, min(count, len(same)))]
            elif len(same) == count:
                return same
        elif len(self._last) >= REMEMBERED:
            self._last.popitem(last=False)
        seed = f"{tenant}\0{model}".encode()
        hashes = prefix_hashes(seed, text, size, self._max_blocks, same)
        self._last[key] = (text[: count * size], hashes)
        self._last.move_to_end(key)
        return hashes


def _equal_blocks(a: bytes, b: bytes, size: int, most: int) -> int:
    """How many leading blocks are equal, of `most` that both have. The first one is: it was looked up by."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if a.startswith(b[: middle * size]):
            low = middle
        else:
            high = middle - 1
    return low
