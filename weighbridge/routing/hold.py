"""The queue of held requests: by tier, then earliest deadline; those that cannot make theirs go behind all that can.

Every operation costs O(log n) or a bounded scan: each tier keeps its most urgent requests in a short sorted window and
the rest in a heap. Removal is lazy.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from heapq import heappop, heappush

from weighbridge.routing.live import Live

WINDOW = 256
"""Requests per tier kept in exact order; ordering decisions look no further."""

_Entry = tuple[float, int, Live]


class Level:
    """Held requests of one priority."""

    __slots__ = ("_gone", "_late", "_rest", "_window", "count", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.count = 0
        self._window: list[_Entry] = []
        self._rest: list[_Entry] = []
        self._late: list[_Entry] = []
        self._gone: set[int] = set()

    def push(self, entry: _Entry) -> None:
        """Add in O(log n)."""
        self.count += 1
        window = self._window
        if self._rest and window and entry > window[-1]:
            heappush(self._rest, entry)
            return
        insort(window, entry)
        if len(window) > 2 * WINDOW:
            heappush(self._rest, window.pop())

    def remove(self, entry: _Entry) -> None:
        """Take out, wherever it is."""
        self.count -= 1
        place = bisect_left(self._window, entry)
        if place < len(self._window) and self._window[place] is entry:
            del self._window[place]
            self._refill()
        else:
            self._gone.add(entry[1])

    def set_late(self, entry: _Entry) -> None:
        """Move from the window behind all that can still make their deadline."""
        place = bisect_left(self._window, entry)
        del self._window[place]
        heappush(self._late, entry)
        self._refill()

    def window(self) -> list[_Entry]:
        """The most urgent ones, earliest deadline first; do not change."""
        return self._window

    def ordered(self) -> Iterator[_Entry]:
        """In order of service: on time, sacrificed, late. Only the first late one is shown."""
        window = self._window
        sacrificed = False
        for entry in window:
            if entry[2].sacrificed:
                sacrificed = True
            else:
                yield entry
        if sacrificed:
            for entry in window:
                if entry[2].sacrificed:
                    yield entry
        late = self._late
        while late and late[0][1] in self._gone:
            self._gone.discard(heappop(late)[1])
        if late:
            yield late[0]

    def _refill(self) -> None:
        while self._rest and len(self._window) < WINDOW:
            entry = heappop(self._rest)
            if entry[1] in self._gone:
                self._gone.discard(entry[1])
            else:
                insort(self._window, entry)


class HoldQueue:
    """Held requests of one model."""

    __slots__ = ("_entries", "_levels", "_order", "_sequence", "judged_s", "quiet_until_s")

    def __init__(self) -> None:
        self.quiet_until_s = float("-inf")
        """Until then nobody looks at the queue: its head has just been told to wait."""
        self.judged_s = float("-inf")
        """When it was last decided who is sacrificed."""
        self._entries: dict[str, tuple[Level, _Entry]] = {}
        self._levels: dict[int, Level] = {}
        self._order: list[Level] = []
        self._sequence = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Live]:
        """Everything held, in order of arrival here."""
        return (entry[2] for _, entry in list(self._entries.values()))

    def push(self, live: Live) -> None:
        """Hold a request."""
        live.late = live.sacrificed = False
        priority = live.tier.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(priority)
            self._order = sorted(self._levels.values(), key=lambda each: each.priority)
        self._sequence += 1
        entry = (live.due_s, self._sequence, live)
        self._entries[live.request.id] = (level, entry)
        level.push(entry)

    def remove(self, request_id: str) -> Live | None:
        """Take a request out, served or gone; None if it is not here."""
        found = self._entries.pop(request_id, None)
        if found is None:
            return None
        level, entry = found
        level.remove(entry)
        return entry[2]

    def first(self, now_s: float, seconds_per_token: float, base_s: float, skip: Container[str] = ()) -> Live | None:
        """The next one to serve that is not in `skip`.

        One that cannot make its deadline any more (its own prefill at `seconds_per_token` and `base_s` on the fastest
        instance would end too late) is put behind all that can.
        """
        for level in self._order:
            found = self._first(level, now_s + base_s, seconds_per_token, skip)
            if found is not None:
                return found
        return None

    def _first(self, level: Level, start_s: float, seconds_per_token: float, skip: Container[str]) -> Live | None:
        while True:
            late: _Entry | None = None
            for entry in level.ordered():
                live = entry[2]
                if live.request.id in skip:
                    continue
                if live.late or start_s + live.request.prompt_tokens * seconds_per_token <= live.deadline_s:
                    return live
                late = entry
                break
            if late is None:
                return None
            late[2].late = True
            level.set_late(late)

    def levels(self) -> list[Level]:
        """Most urgent priority first."""
        return self._order
