"""The last values of a number, and how large all but a few of them are."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class Recent:
    """A window of the last `count` values, kept sorted."""

    __slots__ = ("_count", "_order", "_share", "_sorted")

    def __init__(self, count: int, share: float) -> None:
        """`share` of the values may be larger than what `value` tells."""
        self._count = count
        self._share = share
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        """One more, and the oldest goes when the window is full. O(log count) comparisons and one move of memory."""
        self._order.append(value)
        insort(self._sorted, value)
        if len(self._order) > self._count:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]

    def value(self) -> float:
        """The largest value but for `share` of them, the larger one between two; 0 while there is none."""
        ordered = self._sorted
        return ordered[min(int(len(ordered) * (1.0 - self._share)), len(ordered) - 1)] if ordered else 0.0
