"""One poll for all viewers, one render for all viewers of a view, and what changed since a viewer's last tick.

A view that nobody looks at costs nothing. A viewer is never queued for: one that reads slowly skips ticks and is given
the newest state when it can take it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from weighbridge.core.errors import WeighbridgeError
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.snapshot import Snapshot
from weighbridge.dashboard.view import View

log = logging.getLogger("weighbridge.dashboard")

Page = Callable[[Snapshot, Query], View]
KEPT_VIEWS = 96
KEPT_TICKS = 8


class Source(Protocol):
    """Where snapshots come from."""

    name: str

    async def poll(self) -> Snapshot:
        """The newest snapshot. Raises WeighbridgeError or OSError when the source cannot be read."""
        ...

    async def close(self) -> None:
        """Give back what is held."""
        ...


class Hub:
    """Holds the newest snapshot and the views rendered from it."""

    def __init__(self, source: Source, interval_s: float = 1.0) -> None:
        self.source = source
        self.interval_s = interval_s
        self.tick = 0
        self.viewers = 0
        self.snapshot = Snapshot(at_s=0.0, source=source.name)
        self._read_s = time.monotonic()
        self._changed = asyncio.Event()
        self._views: OrderedDict[tuple[int, str], View] = OrderedDict()
        self._deltas: dict[tuple[int, str], bytes] = {}

    async def poll(self) -> None:
        """Read the source once; on failure the last snapshot stays, marked with the reason and its age."""
        try:
            self.snapshot = await self.source.poll()
            self._read_s = time.monotonic()
        except (WeighbridgeError, OSError) as error:
            age = time.monotonic() - self._read_s
            self.snapshot = msgspec.structs.replace(self.snapshot, error=str(error) or type(error).__name__, age_s=age)
        self.touch()

    def touch(self) -> None:
        """Begin a tick: whatever is rendered from now on is new, and waiting viewers wake."""
        self.tick += 1
        self._deltas.clear()
        while self._views and next(iter(self._views))[0] <= self.tick - KEPT_TICKS:
            self._views.popitem(last=False)
        self._changed.set()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Poll for ever at a steady pace; an unexpected failure is logged once per kind and polling goes on."""
        seen: set[str] = set()
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            try:
                await self.poll()
            except Exception as error:
                if str(error) not in seen:
                    seen.add(str(error))
                    log.exception("cannot build a snapshot from %s", self.source.name)
                self.snapshot = msgspec.structs.replace(
                    self.snapshot, error=f"unexpected answer: {type(error).__name__}"
                )
                self.touch()
            due = max(due + self.interval_s, loop.time())
            await asyncio.sleep(due - loop.time())

    async def next_tick(self, timeout_s: float) -> bool:
        """Wait for the next tick; False after `timeout_s` without one."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def view(self, page: Page, path: str, query: Query) -> View:
        """The view of this tick, rendered at most once."""
        key = (self.tick, f"{path}?{query.key}")
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = page(self.snapshot, query)
            while len(self._views) > KEPT_VIEWS:
                self._views.popitem(last=False)
        return found

    def delta(self, page: Page, path: str, query: Query, since: int) -> bytes:
        """One server-sent event: what a viewer that saw tick `since` must change. Shared by equal viewers."""
        name = f"{path}?{query.key}"
        cached = self._deltas.get((since, name))
        if cached is None:
            old = self._views.get((since, name))
            new = self.view(page, path, query)
            if old is None or old.shape != new.shape:
                changes = {"main": str(new.body)}
            else:
                changes = {k: str(v) for k, v in new.parts.items() if old.parts.get(k) != v}
            cached = self._deltas[since, name] = b"data: " + msgspec.json.encode(changes) + b"\n\n"
        return cached
