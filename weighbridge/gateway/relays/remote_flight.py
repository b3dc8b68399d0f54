"""A request of a relay as the Router's process holds it: the driver's orders go to the relay with its connections."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weighbridge.core.actions import Dispatch, Reject
from weighbridge.core.events import RequestDispatched
from weighbridge.core.request import Request
from weighbridge.gateway.outcome import Outcome
from weighbridge.gateway.records import DecisionRecord
from weighbridge.gateway.relays.wire import Act, Stop

if TYPE_CHECKING:
    from weighbridge.gateway.endpoint import Endpoint
    from weighbridge.gateway.relays.line import Line


class RemoteFlight:
    """In the driver's books from its arrival to its end; counts as running on the engines it was sent to."""

    __slots__ = ("_engines", "attempt", "explain", "leg", "line", "record", "request")

    def __init__(self, line: Line, request: Request, *, explain: bool) -> None:
        self.line = line
        self.request = request
        self.explain = explain
        self.record: DecisionRecord | None = None
        self.attempt = 0
        self.leg = "whole"
        self._engines: tuple[Endpoint, ...] = ()

    @property
    def instance(self) -> str:
        """Where it runs; empty while it runs nowhere."""
        return self._engines[0].name if self._engines else ""

    @property
    def engine(self) -> Endpoint | None:
        """The same as an engine."""
        return self._engines[0] if self._engines else None

    @property
    def prefill(self) -> Endpoint | None:
        """The engine that computes its prompt for another."""
        return self._engines[-1] if self._engines and self.leg in ("prefill", "both") else None

    def dispatch(self, action: Dispatch) -> None:
        """Sends the order to the relay, with the decision where its client wants to see it."""
        self.attempt, self.leg = action.attempt, action.leg
        self.run_on(action.instance, action.prefill_instance if action.leg == "both" else None)
        if action.decision is not None and not self.explain:
            action = msgspec.structs.replace(action, decision=None)
        self.line.send(Act(action))
        self.line.driver.feed(RequestDispatched(request_id=action.request_id))

    def reject(self, action: Reject) -> None:
        """The Router's refusal is its end."""
        line = self.line
        if action.reason == "no_instance":
            wait_s = line.health.recovery_s(self.request.model, action.retry_after_s)
            action = msgspec.structs.replace(action, retry_after_s=wait_s)
        if self.record is not None:
            e2e_s = line.driver.now() - self.request.arrival_s
            self.record.outcome = Outcome(outcome=f"rejected_{action.reason}", instance=self.instance, e2e_s=e2e_s)
        line.forget(self, self.request.prompt_tokens)
        line.send(Act(action))

    def abort(self, reason: str) -> None:
        """Its attempt is to stop; the relay answers with its end."""
        self.line.send(Stop(self.request.id, self.attempt, reason))

    def break_off(self) -> None:
        """The Router's process failed at it: the relay answers it, and stops what runs."""
        self.reject(Reject(request_id=self.request.id, status=500, reason="internal_error"))

    def run_on(self, *names: str | None) -> None:
        """It runs on these engines now, and on no others."""
        self.leave()
        endpoints = self.line.driver.endpoints
        self._engines = tuple(endpoints[name] for name in names if name is not None and name in endpoints)
        for engine in self._engines:
            engine.running += 1

    def leave(self) -> None:
        """It runs nowhere."""
        for engine in self._engines:
            engine.running -= 1
        self._engines = ()
