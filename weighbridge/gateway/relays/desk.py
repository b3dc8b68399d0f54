"""A relay's stand-in for the Router: events go to the Router's process, its actions come back.

While no Router is connected, requests that run go on, and those that wait for one wait; `resume` tells a new Router of
both, and of what ended in the meantime.
"""

from __future__ import annotations

import secrets
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from weighbridge.core.actions import Dispatch, Reject
from weighbridge.core.decision import Decision
from weighbridge.core.errors import RequestError
from weighbridge.core.events import (
    Event,
    FirstToken,
    PrefillFinished,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    TokensProgressed,
)
from weighbridge.gateway.desk import Desk
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.records import DecisionRecord
from weighbridge.gateway.refusal import send_request_error
from weighbridge.gateway.relays.link import Link
from weighbridge.gateway.relays.quotas import RelayQuotas
from weighbridge.gateway.relays.wire import Arrived, Ended, Refused, Runs, Stop, Taken, Went
from weighbridge.gateway.stats import Stats

if TYPE_CHECKING:
    from weighbridge.gateway.flight import Flight

KEPT_ENDS = 20_000
"""Ends that a relay remembers for the next Router; beyond them the oldest are forgotten and counted."""
WAIT_AGAIN_S = 1.0


class _Case:
    """One live request here: its flight, and what the Router last ordered, None while it waits for an order."""

    __slots__ = ("explain", "flight", "order", "record")

    def __init__(self, flight: Flight, *, explain: bool) -> None:
        self.flight = flight
        self.explain = explain
        self.order: Dispatch | None = None
        self.record: DecisionRecord | None = None


class RelayDesk(Desk):
    """Messages to the Router's process go over `link`, in one order."""

    def __init__(self, stats: Stats, start_s: float, link: Link) -> None:
        endpoints: dict[str, Endpoint] = {}
        super().__init__(endpoints, stats, start_s)
        self.quotas = RelayQuotas()
        self.connected = False
        self.full = False
        """The Router's process takes nothing more: new requests are refused, so that buffers stay bounded."""
        self.gave_up = False
        """No Router came in time: requests that need one are refused until one is there."""
        self.ends_forgotten = 0
        self._link = link
        self._cases: dict[str, _Case] = {}
        self._ends: deque[tuple[Runs, Ended]] = deque()

    def feed(self, event: Event) -> None:
        """Sends one event of a flight to the Router."""
        if isinstance(event, RequestDispatched):
            return  # the Router's process notes it when it sends the order
        if isinstance(event, RequestArrived):
            self._arrived(event)
        elif isinstance(event, RequestFinished | RequestCancelled):
            self._ended(event)
        elif isinstance(event, RequestFailed):
            if event.retriable:
                self._failed(event)
            else:
                self._ended(event)
        elif isinstance(event, TokensProgressed):
            if self.connected and not self.full:  # the next one tells the same and more
                self._link.report(Went(event))
        elif not self.connected:
            return
        elif isinstance(event, FirstToken):
            self._link.report(Went(event))
        elif isinstance(event, PrefillFinished):  # its decode leg waits for the answer
            self._link.send(Went(event))

    # events

    def _arrived(self, event: RequestArrived) -> None:
        flight: Any = self.flights[event.request.id]
        explain = flight.responder.request.header(b"x-weighbridge-explain") == b"1"
        case = self._cases[event.request.id] = _Case(flight, explain=explain or flight.surface.tracer is not None)
        if self.full:
            self._reject(case, "gateway_busy")
        elif self.gave_up:
            self._reject(case, "no_router")
        elif self.connected:
            self._ask(case)

    def _ask(self, case: _Case) -> None:
        flight = case.flight
        case.order = None
        self._link.send(Arrived(flight.routed, self.quotas.key_of(flight.id), case.explain))

    def _failed(self, event: RequestFailed) -> None:
        case = self._cases[event.request_id]
        case.order = None
        if self.connected:
            outcome = None if case.record is None else case.record.outcome
            self._link.send(Ended(event, outcome))
        elif self.gave_up:
            self._reject(case, "no_router")

    def _ended(self, event: RequestFinished | RequestFailed | RequestCancelled) -> None:
        case = self._cases.pop(event.request_id, None)
        if case is None:
            return
        message = Ended(event, None if case.record is None else case.record.outcome)
        if self.connected:
            self._link.post(message)
            return
        self._remember(case, message)

    # the Router's orders

    def act(self, action: Dispatch | Reject) -> None:
        """Carries out an order; one for a request that has ended since means nothing."""
        case = self._cases.get(action.request_id)
        if case is None:
            return
        flight = case.flight
        if isinstance(action, Reject):
            del self._cases[action.request_id]
            flight.reject(action)
            return
        if action.instance not in self.endpoints or (
            action.prefill_instance is not None and action.prefill_instance not in self.endpoints
        ):
            event = RequestFailed(
                request_id=flight.id, instance=action.instance, reason="unknown_instance", retriable=True
            )
            self.feed(event)
            return
        case.order = action
        decision = action.decision
        if decision is None:  # kept there; here only the number of the attempt is of use
            decision = Decision(
                request_id=flight.id, at_s=0.0, policy="", chosen=action.instance, candidates=(), attempt=action.attempt
            )
        case.record = flight.record = DecisionRecord(decision)
        flight.dispatch(action)

    def stop(self, order: Stop) -> None:
        """Gives up an attempt, unless it has ended or been followed by another."""
        case = self._cases.get(order.request_id)
        if case is not None and case.order is not None and case.order.attempt == order.attempt:
            case.flight.abort(order.reason)

    def break_off(self, request_id: str) -> None:
        """An order failed here: its request ends alone."""
        case = self._cases.get(request_id)
        if case is not None:
            try:
                case.flight.break_off()
            finally:
                self.feed(RequestCancelled(request_id=case.flight.id, reason="internal_error"))

    def refuse(self, told: Refused) -> None:
        """Answers a request that the Router's process would not take in, as if it had never begun."""
        case = self._cases.pop(told.request_id, None)
        if case is None:
            return
        flight = case.flight
        surface, routed = flight.surface, flight.routed
        flight.ended = True
        self.flights.pop(flight.id, None)
        self.quotas.settle(flight.id, 0)
        self.stats.requests.add((routed.endpoint, "", "", f"refused_{told.status}"))
        error = RequestError(
            told.message, status=told.status, type=told.kind, code=told.code, retry_after_s=told.retry_after_s
        )
        responder = flight.responder
        send_request_error(responder, error, surface.id_header(flight.id))
        if surface.access is not None:
            surface.access.refused(responder.request, responder, flight.id, routed.tenant)

    def rename(self, told: Taken) -> None:
        """A client's id is in use on another relay: the request goes on under one of ours."""
        case = self._cases.pop(told.request_id, None)
        if case is None:
            return
        flight = case.flight
        self.flights.pop(flight.id, None)
        name = f"wb-{secrets.token_hex(8)}"
        self.quotas.rename(flight.id, name)
        flight.routed = msgspec.structs.replace(flight.routed, id=name)
        flight.id = name
        self.flights[name] = flight
        self._cases[name] = case
        self._ask(case)

    # without a Router

    def lost(self) -> None:
        """The connection is gone."""
        self.connected = self.full = False

    def give_up(self) -> None:
        """No Router came in time: whoever waits for one is answered."""
        self.gave_up = True
        for case in list(self._cases.values()):
            if not self._goes_on(case):
                self._withdraw(case)
                self._reject(case, "no_router")
                event = RequestCancelled(request_id=case.flight.id, reason="no_router")
                self._remember(case, Ended(event))  # the next Router's log is to say how it ended

    def resume(self) -> None:
        """A Router is there: it is told what ended without it, what runs, and what waits."""
        self.connected, self.gave_up = True, False
        while self._ends:
            for message in self._ends.popleft():
                self._link.send(message)
        for case in list(self._cases.values()):
            if self._goes_on(case):
                self._link.send(self._runs(case))
            else:
                self._withdraw(case)
                self._ask(case)

    def _runs(self, case: _Case) -> Runs:
        flight, order = case.flight, case.order
        return Runs(
            RequestAdopted(
                request=flight.routed,
                instance="" if order is None else order.instance,
                attempt=1 if order is None else order.attempt,
                output_tokens=flight.output_tokens if flight.first_token_s is not None else 0,
            ),
            case.explain,
        )

    @staticmethod
    def _goes_on(case: _Case) -> bool:
        """Whether it needs no Router to come to its end: its last, or only, leg is running."""
        legs = case.flight.legs
        return case.order is not None and case.order.leg != "prefill" and (legs is None or not legs.running)

    @staticmethod
    def _withdraw(case: _Case) -> None:
        """A prompt's leg alone is no use without a Router to say who decodes."""
        if case.order is not None:
            case.flight.detach()
            case.order = None

    def _reject(self, case: _Case, reason: str) -> None:
        self._cases.pop(case.flight.id, None)
        action = Reject(request_id=case.flight.id, status=503, reason=reason, retry_after_s=WAIT_AGAIN_S)
        case.flight.reject(action)

    def _remember(self, case: _Case, message: Ended) -> None:
        if len(self._ends) >= KEPT_ENDS:
            self._ends.popleft()
            self.ends_forgotten += 1
        self._ends.append((self._runs(case), message))
