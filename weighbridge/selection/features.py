"""Text to numbers without a model: hashed words, word pairs and five-byte windows, in whole-array passes.

The text is read as lower-cased UTF-8. A token is a run of letters, one digit, one punctuation mark, or one
ideograph (scripts without spaces still give pairs). Nothing is learned here, so an encoder is its version and
its number of buckets; a checkpoint names both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]
IntArray = NDArray[np.int64]

SKETCH_DIMS = 256
WINDOW_BYTES = 5
REPEAT_WEIGHT = 0.5
_SORT_BELOW = 1024  # below this many hashes sorting is cheaper than a pass over all buckets
_SPACE, _LETTER, _SINGLE, _IDEOGRAPH = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Features:
    """One text. `buckets` are distinct and ascending, `values` has unit length; `tokens` counts words and marks."""

    buckets: IntArray
    values: FloatArray
    tokens: int

    def sketch(self) -> FloatArray:
        """A dense unit vector of SKETCH_DIMS: signed sums of the values, so that dot products survive on average."""
        signed = np.where((self.buckets >> 8) & 1, self.values, -self.values)
        dense = np.bincount(self.buckets & (SKETCH_DIMS - 1), weights=signed, minlength=SKETCH_DIMS)
        norm = float(np.sqrt(dense @ dense))
        return (dense / norm if norm > 0.0 else dense).astype(np.float32)


class Encoder(Protocol):
    """Anything that turns a routing text into Features; equal text must give equal features in every process."""

    @property
    def name(self) -> str: ...

    @property
    def buckets(self) -> int: ...

    def encode(self, text: str) -> Features: ...

    def words(self, text: str) -> list[tuple[str, int]]: ...


def _byte_classes() -> NDArray[np.uint8]:
    table = np.full(256, _SINGLE, np.uint8)
    table[[9, 10, 11, 12, 13, 32]] = _SPACE
    for byte in b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_":
        table[byte] = _LETTER
    table[0x80:] = _LETTER
    table[0xE3:0xEE] = _IDEOGRAPH  # first byte of U+3000..U+DFFF: kana, CJK, Hangul
    table[0xF0] = _IDEOGRAPH  # emoji and the rarer ideographs
    return table


def _powers(base: int, count: int) -> NDArray[np.uint64]:
    out, power = np.empty(count, np.uint64), 1
    for i in range(count):
        out[i] = power
        power = power * base & 0xFFFFFFFFFFFFFFFF
    return out


_CLASSES = _byte_classes()
_POWERS = _powers(0x100000001B3, 64)
_MIX = np.uint64(0x9E3779B97F4A7C15)
_PAIR = np.uint64(0xC2B2AE3D27D4EB4F)
_SALT_PAIR = np.uint64(0x165667B19E3779F9)
_SALT_WINDOW = np.uint64(0x27D4EB2F165667C5)
_SHIFT = np.uint64(32)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread sums of powers over all bits (multiply, fold, multiply)."""
    values = values * _MIX
    values ^= values >> _SHIFT
    values *= _PAIR
    values ^= values >> _SHIFT
    return values


@dataclass(frozen=True, slots=True)
class HashedNgrams:
    """The default encoder. `buckets` is a power of two, at least SKETCH_DIMS * 2."""

    buckets: int = 1 << 15

    @property
    def name(self) -> str:
        return f"hashed-ngrams/1:{self.buckets}"

    def encode(self, text: str) -> Features:
        data = np.frombuffer(text.lower().encode("utf-8", "surrogatepass"), np.uint8)
        classes = _CLASSES[data]
        words = _word_hashes(data, classes)
        if not words.size:
            return Features(np.zeros(0, np.int64), np.zeros(0, np.float32), 0)
        pairs = (words[:-1] * _PAIR) ^ words[1:] ^ _SALT_PAIR
        hashes = np.concatenate([words, _mix(np.concatenate([pairs, _window_sums(data, classes)]))])
        places = (hashes & np.uint64(self.buckets - 1)).astype(np.int64)
        if places.size < _SORT_BELOW:
            kept, counts = np.unique(places, return_counts=True)
        else:
            every = np.bincount(places, minlength=self.buckets)
            kept = np.flatnonzero(every != 0)  # several times faster than on the integers
            counts = every[kept]
        # repeats say little about the family of a task, so they count less than a logarithm
        values = 1.0 + REPEAT_WEIGHT * np.log(counts)
        values /= np.sqrt(values @ values)
        return Features(kept, values.astype(np.float32), int(words.size))

    def words(self, text: str) -> list[tuple[str, int]]:
        """Every token with its bucket, in order; for explanations."""
        raw = text.lower().encode("utf-8", "surrogatepass")
        data = np.frombuffer(raw, np.uint8)
        classes = _CLASSES[data]
        starts = _token_starts(classes).tolist()
        buckets = (_word_hashes(data, classes) & np.uint64(self.buckets - 1)).tolist()
        ends = [*starts[1:], len(raw)][: len(starts)]
        pieces = [raw[a:b].decode("utf-8", "replace").strip() for a, b in zip(starts, ends, strict=True)]
        return list(zip(pieces, buckets, strict=True))


def _token_starts(classes: NDArray[np.uint8]) -> IntArray:
    before = np.zeros_like(classes)
    before[1:] = classes[:-1]
    fresh = (classes == _LETTER) & ((before == _SPACE) | (before == _SINGLE))
    return np.flatnonzero((classes >= _SINGLE) | fresh)


def _word_hashes(data: NDArray[np.uint8], classes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """One hash per token, in order. A token owns its trailing spaces, which count as nothing."""
    starts = _token_starts(classes)
    if not starts.size:
        return np.zeros(0, np.uint64)
    data, classes = data[starts[0] :], classes[starts[0] :]
    starts = starts - starts[0]
    lengths = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1] = data.size - starts[-1]
    place = np.arange(data.size) - starts.repeat(lengths)
    terms = np.where(classes != _SPACE, data, 0).astype(np.uint64) * _POWERS[np.minimum(place, 63)]
    return _mix(np.add.reduceat(terms, starts))


def _window_sums(data: NDArray[np.uint8], classes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """One number per run of WINDOW_BYTES bytes, white space collapsed to one blank; to be mixed."""
    spaces = classes == _SPACE
    keep = ~spaces
    keep[1:] |= ~spaces[:-1]
    squeezed = np.where(spaces, 32, data)[keep].astype(np.uint64)
    count = squeezed.size - WINDOW_BYTES + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    total: NDArray[np.uint64] = squeezed[:count].copy()
    for offset in range(1, WINDOW_BYTES):
        total += squeezed[offset : offset + count] * _POWERS[offset]
    total ^= _SALT_WINDOW
    return total
