"""Events of a stream that are like those before them: most of a stream is known without a closer look."""

import re

MOST_MISSES = 8
_VALUE_END = re.compile(rb'"\s*[,}\]]')
"""The closing quote of a string that is a value, not a key."""


class Alike:
    """Recognises events that differ from those before only within one text.

    The events of a stream mostly repeat all but a few bytes. Two of them, one behind the other, in which nothing needs
    a closer look, show where: within a string that is a value. A third that has all the same around that string, and no
    quote and no line end in it, is of their kind: no key can have come in.
    """

    __slots__ = ("_before", "_behind", "_hits", "_last", "_misses")

    def __init__(self) -> None:
        self._before = self._behind = b""
        self._last = b""
        self._hits = self._misses = 0

    def count(self, whole: bytes) -> int:
        """How many events `whole` is, if all of them are such; else 0."""
        before, behind = self._before, self._behind
        if not before:
            return 0
        # comparing slices and `in` are quicker than the methods for both, which parse their arguments
        start, tail = len(before), len(behind)
        blocks = whole.split(b"\n\n")
        rest = blocks.pop()
        texts = []
        for block in blocks:
            stop = len(block) - tail
            if stop < start or block[:start] != before or block[stop:] != behind:
                return self._miss()
            texts.append(block[start:stop])
        text = texts[0] if len(texts) == 1 else b"".join(texts)
        if rest or b'"' in text or b"\n" in text or b"\r" in text:
            return self._miss()
        self._hits += 1
        return len(blocks)

    def _miss(self) -> int:
        self._misses += 1
        if self._misses > MOST_MISSES and self._misses > self._hits:
            self._before = b""  # a stream of another kind: not worth a look
        return 0

    def learn(self, whole: bytes, start: int) -> None:
        """Takes note of plain events (`data:` lines, LF, nothing that needs a closer look), until it knows enough.

        Those before `start` are not known to be plain.
        """
        if self._before or self._misses > MOST_MISSES:
            return
        end = len(whole) - 2
        begin = whole.rfind(b"\n\n", start, end) + 2
        if begin < 2:
            begin = start
        if begin >= end:
            return
        known, last = self._last, whole[begin:end]
        self._last = last
        if not known:
            return
        same = _same_length(known, last)
        back = _same_length(known[same:][::-1], last[same:][::-1])
        opening = last.rfind(b'"', 0, same) + 1
        closing = last.find(b'"', len(last) - back)
        before, behind = last[:opening], last[closing:]
        # an odd number of quotes before it: it is within a string
        inside = back > 0 < closing and before.count(b'"') % 2 and _VALUE_END.match(behind)
        if inside and b"\\" not in last:
            self._before, self._behind = before, behind
        else:
            self._misses += 1


def _same_length(one: bytes, other: bytes) -> int:
    """Length of the common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
