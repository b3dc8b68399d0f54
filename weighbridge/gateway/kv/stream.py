"""The order of one publisher's batches: duplicates, gaps and restarts told apart. Pure.

What arrives live on a subscription never goes backwards while one process publishes. So a live number below the next
one expected live is a new process; one that a replay has given already is a duplicate, if it is the same batch (a
checksum of the last ones is kept: batches hold the time); one above is a gap.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import Literal

Verdict = Literal["apply", "duplicate", "gap", "restart"]
KEPT_MARKS = 1024


class Sequence:
    """`next` is the number to be applied next (None: nothing seen yet)."""

    __slots__ = ("_live", "_marks", "next")

    def __init__(self) -> None:
        self.next: int | None = None
        self._live = 0
        self._marks: OrderedDict[int, int] = OrderedDict()

    def live(self, number: int, payload: bytes) -> Verdict:
        """What a batch that arrived on the subscription means. After `gap` or `restart` ask again once repaired."""
        known = self._marks.get(number)
        if number < self._live or (known is not None and known != zlib.crc32(payload)):
            self.forget()
            return "restart"
        if self.next is None or number > self.next:
            return "gap"
        self._live = number + 1
        if number < self.next:
            return "duplicate"
        self._take(number, payload)
        return "apply"

    def replayed(self, number: int, payload: bytes) -> bool:
        """Whether a batch out of a replay is to be applied; numbers come in order."""
        if self.next is not None and number < self.next:
            return False
        self._take(number, payload)
        return True

    def skip_to(self, number: int) -> int:
        """Gives up everything before `number`; returns how many batches that loses (0 at the very beginning)."""
        lost = 0 if self.next is None else max(number - self.next, 0)
        self.next = number
        return lost

    def forget(self) -> None:
        """The publisher is another process, or everything is to be read again."""
        self.next = None
        self._live = 0
        self._marks.clear()

    def _take(self, number: int, payload: bytes) -> None:
        self.next = number + 1
        self._marks[number] = zlib.crc32(payload)
        while len(self._marks) > KEPT_MARKS:
            self._marks.popitem(last=False)
