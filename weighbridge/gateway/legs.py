"""What a disaggregated request has besides its flight: the prompt's leg, and the KV that this leaves behind.

The flight itself is the sink of the second leg. KV is used once and in time, or its engine is told that nobody comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weighbridge.core.actions import Dispatch
from weighbridge.core.events import PrefillFinished
from weighbridge.gateway.pairs import CONCURRENT, concurrent_legs, decode_body, prefill_body
from weighbridge.gateway.prefill import LEASE_S, PrefillLeg, give_up_kv
from weighbridge.gateway.reply import FORWARDED_ERRORS, client_error
from weighbridge.http import ConnectFailed, ExchangeFailed, ReplyHead

if TYPE_CHECKING:
    from weighbridge.gateway.endpoint import Endpoint
    from weighbridge.gateway.flight import Flight


class Legs:
    """Created by a flight at its first dispatch of a leg; lives as long as the flight."""

    __slots__ = ("_bound", "_flight", "_params", "_params_s", "_prefill", "_spent", "source")

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._prefill: PrefillLeg | None = None
        self._params: bytes | None = None
        self._params_s = 0.0
        self._spent: bytes | None = None
        self._bound: tuple[Endpoint, bytes] | None = None  # who decodes next, chosen with the prefill instance
        self.source: Endpoint | None = None
        """Who computed the prompt."""

    @property
    def running(self) -> bool:
        """Whether the prompt's leg has not ended."""
        return self._prefill is not None

    @property
    def tied(self) -> bool:
        """Whether what is sent now names KV that is good for one use: it must not be sent twice."""
        return self._spent is not None or self._prefill is not None

    def begin(self, action: Dispatch) -> None:
        """A leg, or after failed pairs the whole request, is about to be sent."""
        self._bound = None
        if action.leg != "decode":
            self.source = None

    # the prompt

    def send_prefill(self, action: Dispatch) -> None:
        """Sends the prompt's leg alone; who decodes is chosen when it is done."""
        flight = self._flight
        driver = flight.surface.driver
        endpoint = flight.endpoint = driver.endpoints[action.instance]
        body, _ = endpoint.edit(flight.client_request, action.priority, None, flight.salt)
        flight.dispatched_s = driver.now()
        self._start(endpoint, prefill_body(body, flight.client_request))

    def start_pair(self, action: Dispatch, body: bytes) -> bytes | None:
        """Starts the prefill leg of a pair chosen together; the decode leg's body, or None if it must wait for it."""
        flight = self._flight
        assert action.prefill_instance is not None
        assert flight.endpoint is not None
        prefill = flight.surface.driver.endpoints[action.prefill_instance]
        if prefill.transfer not in CONCURRENT:
            self._bound = (flight.endpoint, body)
            flight.endpoint = prefill
            self._start(prefill, prefill_body(body, flight.client_request))
            return None
        legs = concurrent_legs(body, flight.client_request, prefill, flight.surface.rng.getrandbits(63))
        if legs is None:
            flight.endpoint = prefill
            flight.attempt_failed("bootstrap_unknown")
            return None
        self._start(prefill, legs.prefill, legs.headers)
        return legs.decode

    def _start(self, endpoint: Endpoint, body: bytes, headers: bytes = b"") -> None:
        flight = self._flight
        payload = endpoint.request_bytes(flight.path, body, flight.id, flight.headers + headers)
        self._prefill = PrefillLeg(endpoint, payload, self._done, self._failed)

    def _done(self, params: bytes | None) -> None:
        """The prompt is computed; the Router chooses who decodes."""
        flight = self._flight
        assert self._prefill is not None
        self.source, self._prefill = self._prefill.endpoint, None
        flight.surface.health.request_succeeded(self.source)
        if self.source.transfer not in CONCURRENT:
            self._params, self._params_s = params, flight.surface.driver.now()
        flight.surface.driver.feed(PrefillFinished(request_id=flight.id))
        if self._bound is not None and not flight.ended:
            (endpoint, body), self._bound = self._bound, None
            if flight.surface.driver.endpoints.get(endpoint.name) is not endpoint:  # taken out between the legs
                flight.endpoint = endpoint
                flight.attempt_failed("pool was closed")
                return
            flight.post(endpoint, self.take(body) if params is not None else body)

    def _failed(self, error: ExchangeFailed | None, head: ReplyHead | None, body: bytes) -> None:
        """The prompt could not be computed: nobody must wait for its KV."""
        flight = self._flight
        assert self._prefill is not None
        at_fault, self._prefill = self._prefill.endpoint, None
        flight.detach()
        flight.endpoint = at_fault
        if head is None:
            if isinstance(error, ConnectFailed):
                flight.surface.health.connect_failed(at_fault)
            flight.attempt_failed(type(error).__name__)
        elif head.status in FORWARDED_ERRORS and not flight.responder.started:
            flight.responder.send_raw(*client_error(head, body, flight.id))
            flight.failed(f"client_error_{head.status}")
        else:
            flight.attempt_failed(f"status_{head.status}")

    # its KV

    def too_old(self) -> bool:
        """Whether the KV that waits may be gone by now; then it is given up."""
        if self._params is None or self._flight.surface.driver.now() - self._params_s <= LEASE_S:
            return False
        self.give_up_kv()
        return True

    def take(self, body: bytes) -> bytes:
        """The decode leg's body with the transfer parameters, where there are any; they are good for one use."""
        if self._params is None:
            return body
        self._spent, self._params = self._params, None
        return decode_body(body, self._spent)

    def used(self) -> None:
        """The decode leg ended well."""
        self._spent = None

    def give_up_kv(self) -> None:
        """The KV of a finished prefill leg will not be used: it need not wait for its lease to run out."""
        params = self._params or self._spent
        self._params = self._spent = None
        if params is not None and self.source is not None:
            give_up_kv(self.source, params)

    def stop(self) -> None:
        """The attempt is over."""
        prefill, self._prefill = self._prefill, None
        if prefill is not None:
            prefill.cancel()
        self.give_up_kv()
