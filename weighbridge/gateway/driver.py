"""Drives the Router in wall time: one event at a time in, its actions out, both to the event log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from weighbridge.core.actions import Abort, Action, Dispatch, Hold, Preempt, Reject
from weighbridge.core.event_log import Entry
from weighbridge.core.events import Event, RequestDispatched, Tick
from weighbridge.gateway.desk import Desk
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.log_writer import LogWriter
from weighbridge.gateway.records import DecisionRecord
from weighbridge.gateway.stats import Stats
from weighbridge.routing.refinement import Refinement
from weighbridge.routing.router import Router

log = logging.getLogger("weighbridge.gateway")
KEPT_DECISIONS = 2000
TICK_S = 0.05


class Driver(Desk):
    """Owns the Router's clock and the live requests.

    Events are handled strictly one after another: an event raised while actions are being carried out waits its turn,
    so that the log's order is the order in which the Router saw them.
    """

    def __init__(
        self,
        router: Router,
        endpoints: dict[str, Endpoint],
        writer: LogWriter | None,
        stats: Stats,
        start_s: float | None = None,
    ) -> None:
        super().__init__(endpoints, stats, start_s)
        self.router = router
        self.refinement = Refinement()
        self.fleet_version = 0
        """Grows whenever an engine joins, leaves, goes up or down, or tells other facts."""
        self.decisions: deque[DecisionRecord] = deque(maxlen=KEPT_DECISIONS)
        self.writer = writer
        self._queue: deque[Event] = deque()
        self._busy = False
        self._tick: asyncio.TimerHandle | None = None

    def feed(self, event: Event) -> None:
        """Gives one event to the Router and carries out what it answers."""
        if self._busy:
            self._queue.append(event)
            return
        self._busy = True
        try:
            self._step(event)
            while self._queue:
                self._step(self._queue.popleft())
        finally:
            self._busy = False
        if self._tick is None and self.router.wants_tick:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        self._tick = None
        if self.router.wants_tick:
            self.feed(Tick())

    def stop(self) -> None:
        """No more ticks."""
        if self._tick is not None:
            self._tick.cancel()

    def _step(self, event: Event) -> None:
        now = time.monotonic() - self._start_s
        if (
            type(event) is RequestDispatched
        ):  # of every request, and neither router nor refinement does anything with it
            if self.writer is not None:
                self.writer.record(Entry(now, event, ()))
            return
        actions = self.router.handle(event, now)
        if self.writer is not None:
            self.writer.record(Entry(now, event, tuple(actions)))
        for action in actions:
            self._carry_out(action)
        updates = self.refinement.observe(event, actions, now)
        if updates:
            self._queue.extend(updates)

    def _carry_out(self, action: Action) -> None:
        flight = self.flights.get(action.request_id)
        if flight is None:
            log.error("the router acts on %s, which is not live", action.request_id)
            return
        if isinstance(action, Dispatch):
            if action.decision is not None:
                flight.record = DecisionRecord(action.decision)
                self.decisions.append(flight.record)
            flight.dispatch(action)
        elif isinstance(action, Reject):
            flight.reject(action)
        elif isinstance(action, Abort):
            flight.abort(action.reason)
        elif isinstance(action, Hold):
            pass  # it waits for its Dispatch
        elif isinstance(action, Preempt):
            # only for engines whose spec claims `preemption`, which no adapter does: they pause by priority themselves
            log.error("%s cannot pause %s; it runs on", action.instance, action.request_id)
