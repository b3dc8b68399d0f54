"""The Router's end of one relay's connection: messages become events for the driver, its orders become messages."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from weighbridge.core.actions import Reject
from weighbridge.core.errors import RequestError
from weighbridge.core.events import (
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from weighbridge.gateway.outcome import Outcome
from weighbridge.gateway.relays.remote_flight import RemoteFlight
from weighbridge.gateway.relays.tally import add
from weighbridge.gateway.relays.wire import (
    Act,
    Answered,
    Arrived,
    Beat,
    Ended,
    Hello,
    Refused,
    Runs,
    Sign,
    Splitter,
    Taken,
    Tally,
    Welcome,
    Went,
    decode_up,
    frames,
)
from weighbridge.http.loop_pass import pass_of

if TYPE_CHECKING:
    from weighbridge.gateway.relays.hub import Hub

log = logging.getLogger("weighbridge.gateway.relays")
BEAT = Beat()
MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""What a relay that has stopped reading may leave waiting before it is cut off."""


class Line:
    """An asyncio protocol by its methods. `relay` is 0 until the relay has said which it is."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.driver = hub.gateway.driver
        self.health = hub.gateway.health
        self.relay = 0
        self.pid = 0
        self.lag_s = 0.0
        self.connections = 0
        self.known_fleet = -1
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter()
        self._out: list[Any] = []
        self._asked = False
        """What is being read has something that the relay waits for an answer to."""
        self._handlers: dict[type, Any] = {
            Arrived: self._arrived,
            Went: self._went,
            Ended: self._ended,
            Hello: self._hello,
            Runs: self._runs,
            Sign: self._sign,
            Answered: self._answered,
            Tally: self._tally,
        }

    # asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:
        """A relay has connected."""
        self._transport = transport
        transport.set_write_buffer_limits(high=MAX_UNREAD_BYTES)
        self.hub.opened(self)

    def data_received(self, data: bytes) -> None:
        """Messages, cut anywhere."""
        if self._transport is None:
            return  # cut off
        handlers = self._handlers
        try:
            for body in self._splitter.feed(data):
                for message in decode_up(body):
                    try:
                        handlers[type(message)](message)
                    except Exception:  # what goes wrong with one request must not end those of a whole relay
                        log.exception("a message of relay %d", self.relay)
                        if isinstance(message, Arrived):
                            self._broken(message)
        except (ValueError, msgspec.MsgspecError):
            log.exception("relay %d sent what cannot be read; it is cut off", self.relay)
            self.cut()
            return
        if self._asked:
            self._asked = False
            if not self._out:  # held: the relay gathers what it has until it is answered
                self.send(BEAT)

    def pause_writing(self) -> None:
        """It does not read what it is sent: its requests must not wait for it for ever."""
        log.error("relay %d does not read; it is cut off", self.relay)
        self.cut()

    def resume_writing(self) -> None:
        """Never: it was cut off."""

    def eof_received(self) -> None:
        """The connection closes."""

    def connection_lost(self, error: Exception | None) -> None:
        """The relay is gone, and with it the connections of its clients and to engines."""
        self.over()

    def over(self) -> None:
        """All requests of this connection have ended; nothing of it counts any more."""
        self._transport = None
        self._out.clear()
        self.hub.left(self)
        mine = [f for f in self.driver.flights.values() if isinstance(f, RemoteFlight) and f.line is self]
        for flight in mine:
            request = flight.request
            e2e_s = self.driver.now() - request.arrival_s
            if flight.record is not None:
                flight.record.outcome = Outcome(outcome="failed: relay_lost", instance=flight.instance, e2e_s=e2e_s)
            self.driver.stats.requests.add((request.endpoint, request.model, flight.instance, "relay_lost"))
            self.forget(flight, request.prompt_tokens)
            self.driver.feed(RequestCancelled(request_id=request.id, reason="relay_lost"))
        if mine:
            log.warning("relay %d is gone; %d requests ended with it", self.relay, len(mine))

    # out

    def send(self, message: Any) -> None:
        """Takes a message; all of one pass of the event loop go out together."""
        if not self._out:
            pass_of(asyncio.get_running_loop()).later(self.flush)
        self._out.append(message)

    def flush(self) -> None:
        """Writes what waits, after the news of the fleet, if there are any."""
        if self._transport is None or not self.relay:
            return
        if self.known_fleet != self.driver.fleet_version:
            self.known_fleet = self.driver.fleet_version
            self._out.insert(1 if self._out and isinstance(self._out[0], Welcome) else 0, self.hub.roster())
        if self._out:
            out, self._out = self._out, []
            self._transport.write(frames(out))

    def cut(self) -> None:
        """Ends the connection, and at once what came over it: the relay may be back before its end is noticed."""
        if self._transport is not None:
            self._transport.abort()
            self.over()

    def forget(self, flight: RemoteFlight, used_tokens: int) -> None:
        """A request leaves the books."""
        flight.leave()
        self.driver.flights.pop(flight.request.id, None)
        self.hub.quotas.settle(flight.request.id, used_tokens)

    # in: requests

    def _arrived(self, message: Arrived) -> None:
        self._asked = True
        request = message.request
        if request.id in self.driver.flights:
            self.send(Taken(request.id))
            return
        if self.hub.gateway.guard.shedding:
            self.hub.gateway.guard.sheds += 1
            self.send(Act(Reject(request_id=request.id, status=503, reason="gateway_busy", retry_after_s=1.0)))
            return
        if message.key:
            try:
                self.hub.charge(message.key, request)
            except RequestError as error:
                told = Refused(request.id, error.status, error.message, error.type, error.code, error.retry_after_s)
                self.send(told)
                return
        self.driver.flights[request.id] = RemoteFlight(self, request, explain=message.explain)
        self.driver.feed(RequestArrived(request=request))

    def _broken(self, message: Arrived) -> None:
        """The Router fails at a request: it is answered, and leaves no trace."""
        name = message.request.id
        flight = self._mine(name)
        if flight is not None:
            self.forget(flight, 0)
            self.driver.feed(RequestCancelled(request_id=name, reason="internal_error"))
        self.send(Act(Reject(request_id=name, status=500, reason="internal_error")))

    def _runs(self, message: Runs) -> None:
        self._asked = True
        event = message.event
        if event.request.id in self.driver.flights:  # the same id on two relays while there was no Router
            log.error("relay %d has request %s, which is live elsewhere", self.relay, event.request.id)
            return
        flight = RemoteFlight(self, event.request, explain=message.explain)
        flight.attempt = event.attempt
        self.driver.flights[event.request.id] = flight
        flight.run_on(event.instance or None)
        self.driver.feed(event)

    def _mine(self, request_id: str) -> RemoteFlight | None:
        flight = self.driver.flights.get(request_id)
        return flight if isinstance(flight, RemoteFlight) and flight.line is self else None

    def _went(self, message: Went) -> None:
        event = message.event
        self._asked |= isinstance(event, PrefillFinished)
        flight = self._mine(event.request_id)
        if flight is None:
            return
        if isinstance(event, PrefillFinished):
            if flight.prefill is not None:
                self.health.request_succeeded(flight.prefill)
            if flight.leg == "prefill":
                flight.leave()
        self.driver.feed(event)

    def _ended(self, message: Ended) -> None:
        event, outcome = message.event, message.outcome
        self._asked |= isinstance(event, RequestFailed)
        flight = self._mine(event.request_id)
        if flight is None:
            return  # refused meanwhile
        record = flight.record
        if record is not None and outcome is not None:
            record.outcome = outcome
        if isinstance(event, RequestFailed) and event.retriable:
            flight.leave()
            self.driver.feed(event)
            return
        if isinstance(event, RequestFinished) and flight.engine is not None:
            self.health.request_succeeded(flight.engine)
        used = flight.request.prompt_tokens
        if outcome is not None:
            used = (outcome.prompt_tokens or used) + outcome.output_tokens
        self.forget(flight, used)
        if record is not None:
            self.hub.gateway.surface.forecasts.note(record)
        self.driver.feed(event)

    # in: the rest

    def _hello(self, message: Hello) -> None:
        self.relay, self.pid = message.relay, message.pid
        self.hub.joined(self)

    def _sign(self, message: Sign) -> None:
        endpoint = self.driver.endpoints.get(message.instance)
        if endpoint is None:
            return
        if message.connecting:
            self.health.connect_failed(endpoint)
        else:
            self.health.request_failed(endpoint, message.reason)

    def _answered(self, message: Answered) -> None:
        watch = self.hub.gateway.kv.watches.get(message.instance)
        if watch is not None:
            watch.queue(message.prompt)

    def _tally(self, message: Tally) -> None:
        self.lag_s, self.connections = message.lag_s, message.connections
        add(self.driver.stats, message.changes)
        self.hub.totals.add(message)
