"""Is the event loop late? While it is, new requests are refused, so that those already running keep their pace.

A timer is due every `TICK_S`; how late it comes is what every byte waits at least. The lag is smoothed, so that one
pause (a garbage collection, a stopped process) refuses nobody, and refusing ends below half of the bound.
"""

from __future__ import annotations

import asyncio

TICK_S = 0.05
WEIGHT = 0.25


class LoopGuard:
    """`shedding` is what the request path looks at; `lag_s` and `sheds` are for metrics."""

    def __init__(self, bound_s: float) -> None:
        self.bound_s = bound_s
        self.lag_s = 0.0
        self.shedding = False
        self.sheds = 0
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to measure on the running loop."""
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + TICK_S
        self._timer = loop.call_at(self._due_s, self._tick)

    def stop(self) -> None:
        """Ends measuring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def observe(self, late_s: float) -> None:
        """Takes one measurement of lateness."""
        self.lag_s += WEIGHT * (min(late_s, 2 * self.bound_s) - self.lag_s)  # however long, one pause is one pause
        self.shedding = self.lag_s > (self.bound_s / 2 if self.shedding else self.bound_s)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.observe(max(0.0, now - self._due_s))
        self._due_s = now + TICK_S
        self._timer = loop.call_at(self._due_s, self._tick)
