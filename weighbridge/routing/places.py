"""Places of instances in bit sets and tables: small numbers, used again when an instance is gone."""

from __future__ import annotations

from heapq import heappop, heappush


class Places:
    """Gives the smallest free number. `count` is one more than the largest ever given: what tables must hold."""

    __slots__ = ("_free", "count")

    def __init__(self) -> None:
        self._free: list[int] = []
        self.count = 0

    def take(self) -> int:
        """A number that nobody has."""
        if self._free:
            return heappop(self._free)
        self.count += 1
        return self.count - 1

    def give_back(self, place: int) -> None:
        """Whoever had it left nothing under it."""
        heappush(self._free, place)
