"""What the request path needs of whoever drives the Router: a clock, the engines, the live requests, and an ear.

In one process that is the `Driver` itself; in a relay process it is a stand-in that asks the Router's process.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from weighbridge.core.events import Event
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.stats import Stats

if TYPE_CHECKING:
    from weighbridge.gateway.records import Steered


class Desk:
    """The base of both. `start_s` is the monotonic time at which the router's clock shows 0."""

    def __init__(self, endpoints: dict[str, Endpoint], stats: Stats, start_s: float | None = None) -> None:
        self.endpoints = endpoints
        self.stats = stats
        self.flights: dict[str, Steered] = {}
        self._start_s = time.monotonic() if start_s is None else start_s

    def now(self) -> float:
        """Seconds on the router's clock, which starts at 0 with the gateway."""
        return time.monotonic() - self._start_s

    def feed(self, event: Event) -> None:
        """Tells the Router of one event; what it answers is carried out."""
        raise NotImplementedError

    def feed_soon(self, event: Event) -> None:
        """The same, perhaps together with others that this pass of the event loop brings."""
        self.feed(event)

    def drain(self) -> None:
        """Tells the Router now of what still waits."""
