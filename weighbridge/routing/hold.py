"""The queue of held requests: by tier, fair between tenants, then earliest deadline; the hopeless behind the others.

Every operation costs O(log n) or a bounded scan: a lane (one tenant of one tier) keeps its most urgent requests in a
short sorted window and the rest in a heap. Removal is lazy. Taking the first looks at one request of each tenant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Container, Iterator
from heapq import heappop, heappush, merge
from itertools import islice

from weighbridge.routing.fairness import Fairness
from weighbridge.routing.live import Live

WINDOW = 256
"""Requests per lane kept in exact order; ordering decisions look no further."""
AGED_EVERY = 4
"""Of this many requests served, one may be an aged one of a less urgent tier."""

Entry = tuple[float, int, Live]


def _since(live: Live) -> float:
    return live.held_s


class Lane:
    """Held requests of one tenant in one tier."""

    __slots__ = ("_gone", "_late", "_rest", "_window", "count")

    def __init__(self) -> None:
        self.count = 0
        self._window: list[Entry] = []
        self._rest: list[Entry] = []
        self._late: list[Entry] = []
        self._gone: set[int] = set()

    def push(self, entry: Entry) -> None:
        """Add in O(log n)."""
        self.count += 1
        window = self._window
        if self._rest and window and entry > window[-1]:
            heappush(self._rest, entry)
            return
        insort(window, entry)
        if len(window) > 2 * WINDOW:
            heappush(self._rest, window.pop())

    def remove(self, entry: Entry) -> None:
        """Take out, wherever it is."""
        self.count -= 1
        place = bisect_left(self._window, entry)
        if place < len(self._window) and self._window[place][1] == entry[1]:  # its number in the queue tells it
            del self._window[place]
            self._refill()
        else:
            self._gone.add(entry[1])

    def last(self) -> Entry | None:
        """One of the last to be served: of those in order the last, else a late one."""
        if self._window:
            return self._window[-1]
        late = self._late
        while late and late[-1][1] in self._gone:
            self._gone.discard(late.pop()[1])  # a heap stays one without its last element
        return late[-1] if late else None

    def set_late(self, entry: Entry) -> None:
        """Move from the window behind all that can still make their deadline."""
        del self._window[bisect_left(self._window, entry)]
        heappush(self._late, entry)
        self._refill()

    def window(self) -> list[Entry]:
        """The most urgent ones, earliest deadline first; do not change."""
        return self._window

    def first(self, start_s: float, seconds_per_token: float, skip: Container[str]) -> Entry | None:
        """The next one: on time, else sacrificed, else the earliest late one. Sets aside late ones on its way."""
        while True:
            late: Entry | None = None
            for entry in self._ordered():
                live = entry[2]
                if live.id in skip:
                    continue
                if live.late or start_s + live.prefill_tokens * seconds_per_token <= live.deadline_s:
                    return entry
                late = entry
                break
            if late is None:
                return None
            late[2].late = True
            self.set_late(late)

    def _ordered(self) -> Iterator[Entry]:
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


class Level:
    """Held requests of one priority: a lane per tenant, and the order of arrival."""

    __slots__ = ("arrivals", "lanes", "priority")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.lanes: dict[str, Lane] = {}
        self.arrivals: deque[Live] = deque()

    def window(self) -> list[Entry]:
        """The most urgent of all lanes, earliest deadline first."""
        if len(self.lanes) == 1:
            return next(iter(self.lanes.values())).window()
        return list(islice(merge(*(lane.window() for lane in self.lanes.values())), WINDOW))


class HoldQueue:
    """Held requests of one model."""

    __slots__ = ("_entries", "_fair_tokens", "_fairness", "_full_s", "_full_since_s", "_levels", "_order",
                 "_sequence", "_since_aged", "judged_s", "quiet_until_s")  # fmt: skip

    def __init__(self, fairness: Fairness | None = None, fair_tokens: int = 16_384) -> None:
        self.quiet_until_s = float("-inf")
        """Until then nobody looks at the queue: its head has just been told to wait."""
        self.judged_s = float("-inf")
        """When it was last decided who is sacrificed."""
        self._fairness = fairness or Fairness()
        self._fair_tokens = float(fair_tokens)
        self._entries: dict[str, tuple[Level, Lane, Entry]] = {}
        self._levels: dict[int, Level] = {}
        self._order: list[Level] = []
        self._sequence = 0
        self._since_aged = 0
        self._full_s = 0.0
        self._full_since_s: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __iter__(self) -> Iterator[Live]:
        """Everything held, in order of arrival here."""
        return (entry[2] for _, _, entry in list(self._entries.values()))

    def push(self, live: Live) -> None:
        """Hold a request."""
        live.late = live.sacrificed = False
        priority = live.priority
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(priority)
            self._order = sorted(self._levels.values(), key=lambda each: each.priority)
        tenant = live.tenant
        lane = level.lanes.get(tenant)
        if lane is None:
            lane = level.lanes[tenant] = Lane()
        self._sequence += 1
        entry = (live.due_s, self._sequence, live)
        self._entries[live.id] = (level, lane, entry)
        lane.push(entry)
        if live.tier.max_wait_s is not None:
            level.arrivals.append(live)

    def remove(self, request_id: str) -> Live | None:
        """Take a request out, served or gone; None if it is not here."""
        found = self._entries.pop(request_id, None)
        if found is None:
            return None
        level, lane, entry = found
        lane.remove(entry)
        if not lane.count:
            del level.lanes[entry[2].request.tenant]
        return entry[2]

    def first(self, now_s: float, seconds_per_token: float, base_s: float, skip: Container[str] = ()) -> Live | None:
        """The next one to serve that is not in `skip`.

        One that cannot make its deadline any more (its own prefill at `seconds_per_token` and `base_s` on the fastest
        instance would end too late) is put behind all that can. One that has waited beyond its tier's `max_wait_s`
        comes first, if AGED_EVERY others have been served since the last such.
        """
        aged = self._aged(now_s, skip)
        if aged is not None:
            return aged
        for level in self._order:
            found = self._first(level, now_s + base_s, seconds_per_token, skip)
            if found is not None:
                return found
        return None

    def ages(self, live: Live, now_s: float) -> bool:
        """Whether it has waited beyond its tier's `max_wait_s`, and it is such a one's turn."""
        most = live.tier.max_wait_s
        return most is not None and now_s - live.held_s > most and self._since_aged >= AGED_EVERY - 1

    def served(self, live: Live, now_s: float) -> None:
        """`live`, which `first` gave or that waited for the same engines elsewhere, was sent."""
        waited = live.tier.max_wait_s
        aged = waited is not None and now_s - live.held_s > waited
        self._since_aged = 0 if aged else self._since_aged + 1

    def found(self, room: bool, now_s: float) -> None:
        """Whoever is first was found room for, or there was none."""
        since = self._full_since_s
        if room:
            if since is not None:
                self._full_s += now_s - since
                self._full_since_s = None
        elif since is None:
            self._full_since_s = now_s

    def full_s(self, now_s: float) -> float:
        """Seconds until now in which there was no room for whoever was first."""
        since = self._full_since_s
        return self._full_s if since is None else self._full_s + now_s - since

    def last(self) -> Live | None:
        """The one to shed when there are too many: of the least urgent sheddable tier, the latest to arrive."""
        for level in reversed(self._order):
            last = [entry[2] for lane in level.lanes.values() if (entry := lane.last()) is not None]
            latest = max((live for live in last if live.tier.sheddable), key=_since, default=None)
            if latest is not None:
                return latest
        return None

    def oldest(self) -> Live | None:
        """The one that is here longest."""
        return next((entry[2] for _, _, entry in self._entries.values()), None)

    def upto(self, priority: int) -> int:
        """How many are held of this priority and more urgent ones. O(tenants)."""
        return sum(lane.count for level in self._order if level.priority <= priority for lane in level.lanes.values())

    def levels(self) -> list[Level]:
        """Most urgent priority first."""
        return self._order

    def _aged(self, now_s: float, skip: Container[str]) -> Live | None:
        if self._since_aged < AGED_EVERY - 1:
            return None
        for level in self._order:
            arrivals = level.arrivals
            while arrivals and arrivals[0].request.id not in self._entries:
                arrivals.popleft()
            if arrivals:
                oldest = arrivals[0]
                most = oldest.tier.max_wait_s
                if most is not None and now_s - oldest.held_s > most and oldest.request.id not in skip:
                    return oldest
        return None

    def _first(self, level: Level, start_s: float, seconds_per_token: float, skip: Container[str]) -> Live | None:
        lanes = level.lanes
        if not lanes:
            return None
        if len(lanes) == 1:
            entry = next(iter(lanes.values())).first(start_s, seconds_per_token, skip)
            return None if entry is None else entry[2]
        fair = self._fairness.behind(lanes, self._fair_tokens)
        best = self._best(lanes, fair, start_s, seconds_per_token, skip)
        if best is None and len(fair) < len(lanes):
            rest = [tenant for tenant in lanes if tenant not in fair]
            best = self._best(lanes, rest, start_s, seconds_per_token, skip)
        return None if best is None else best[2]

    @staticmethod
    def _best(
        lanes: dict[str, Lane], tenants: list[str], start_s: float, seconds_per_token: float, skip: Container[str]
    ) -> Entry | None:
        best: tuple[bool, bool, Entry] | None = None
        for tenant in tenants:
            entry = lanes[tenant].first(start_s, seconds_per_token, skip)
            if entry is not None:
                key = (entry[2].late, entry[2].sacrificed, entry)
                if best is None or key[:2] < best[:2] or (key[:2] == best[:2] and entry[:2] < best[2][:2]):
                    best = key
        return None if best is None else best[2]
