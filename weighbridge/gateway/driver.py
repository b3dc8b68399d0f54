"""Drives the Router in wall time: one event at a time in, its actions out, both to the event log."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

from weighbridge.core.actions import Abort, Action, Dispatch, Hold, Preempt, Reject
from weighbridge.core.decision import Decision
from weighbridge.core.event_log import Entry
from weighbridge.core.events import Event, RequestArrived, RequestCancelled, RequestDispatched, RequestFailed, Tick
from weighbridge.gateway.desk import Desk
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.log_writer import LogWriter
from weighbridge.gateway.records import DecisionRecord, Steered
from weighbridge.gateway.stats import Stats
from weighbridge.http.loop_pass import LoopPass
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
        self.loop_pass: LoopPass | None = None
        """Where events may wait until everything is read; None: nowhere."""
        self._queue: deque[Event] = deque()
        self._busy = False
        self._tick: asyncio.TimerHandle | None = None

    def feed(self, event: Event) -> None:
        """Gives one event to the Router, after those that wait, and carries out what it answers."""
        self._queue.append(event)
        self.drain()

    def feed_soon(self, event: Event) -> None:
        """The same at the end of this pass of the event loop: for what many requests do in one pass."""
        if self.loop_pass is None:
            self.feed(event)
            return
        if not self._queue:
            self.loop_pass.later(self.drain)
        self._queue.append(event)

    def drain(self) -> None:
        """Gives the Router all events that wait."""
        if self._busy:
            return
        self._busy = True
        try:
            while self._queue:
                event = self._queue.popleft()
                try:
                    self._step(event)
                except Exception:  # a bug, a policy's for example: it must not take other requests with it
                    log.exception("the router failed at an event of type %s", type(event).__name__)
                    self._give_up(event)
        finally:
            self._busy = False
        if self._tick is None and self.router.wants_tick:
            self._tick = asyncio.get_running_loop().call_later(TICK_S, self._on_tick)

    def _give_up(self, event: Event) -> None:
        """Its client must not wait for ever."""
        if isinstance(event, RequestArrived | RequestFailed):
            request_id = event.request.id if isinstance(event, RequestArrived) else event.request_id
            flight = self.flights.get(request_id)
            if flight is not None:
                self._break_off(flight, request_id)

    def _break_off(self, flight: Steered, request_id: str) -> None:
        """Ends a request alone; the router hears of it, unless it was its own word that ended it."""
        live = self.flights.get(request_id) is flight
        try:
            flight.break_off()
        except Exception:
            log.exception("a request could not be ended properly")
            self.flights.pop(request_id, None)
        if live:
            self._queue.append(RequestCancelled(request_id=request_id, reason="internal_error"))

    def _on_tick(self) -> None:
        self._tick = None
        if self.router.wants_tick:
            self.feed(Tick())

    def stop(self) -> None:
        """No more ticks; nothing waits any longer."""
        self.drain()
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
        for action in actions:
            if isinstance(action, Dispatch) and action.decision is not None:
                self._note(action.request_id, action.decision)
        if self.writer is not None:
            self.writer.record(Entry(now, event, tuple(actions)))
        for action in actions:
            flight = self.flights.get(action.request_id)
            if flight is None:
                log.error("the router acts on %s, which is not live", action.request_id)
                continue
            try:
                self._carry_out(flight, action)
            except Exception:  # a bug: what the router decided for the others is done all the same
                log.exception("an order of type %s failed", type(action).__name__)
                self._break_off(flight, action.request_id)
        updates = self.refinement.observe(event, actions, now)
        if updates:
            self._queue.extend(updates)

    def _note(self, request_id: str, decision: Decision) -> None:
        """Keeps a decision: as it stands in the entry of the log that comes next, where there is a log."""
        flight = self.flights.get(request_id)
        if flight is not None:
            record = flight.record = DecisionRecord(decision)
            self.decisions.append(record)
            if self.writer is not None:
                self.writer.keep(record)

    def _carry_out(self, flight: Steered, action: Action) -> None:
        if isinstance(action, Dispatch):
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
