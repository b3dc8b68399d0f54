"""One client request on its way: sink of the engine's reply, source of the Router's events, and exactly one end.

Until the first byte has gone to the client the request may be sent elsewhere; after it a failure becomes an error
frame (stream) or a cut connection (whole reply), never a replay.

Longer than 400 lines because every state of one request and its one end belong together.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from weighbridge.core.actions import Dispatch, Reject
from weighbridge.core.events import (
    FirstToken,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    TokensProgressed,
)
from weighbridge.core.request import Request as RoutedRequest
from weighbridge.gateway.assemble import ENDPOINTS as ASSEMBLED
from weighbridge.gateway.assemble import Assembler, stream_body
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.legs import Legs
from weighbridge.gateway.refusal import send_reject
from weighbridge.gateway.reply import (
    FORWARDED_ERRORS,
    assembled_lines,
    error_frame,
    reply_lines,
)
from weighbridge.gateway.reply import client_error as read_client_error
from weighbridge.gateway.stats import Histogram
from weighbridge.gateway.usage import NONE_TOLD, usage_of, usage_of_body
from weighbridge.gateway.usage_fields import Usage
from weighbridge.http import BadReply, ConnectFailed, Exchange, ExchangeFailed, ReplyHead, Responder, SseScanner

if TYPE_CHECKING:
    from weighbridge.gateway.endpoint import Endpoint
    from weighbridge.gateway.records import DecisionRecord
    from weighbridge.gateway.surface import Surface

PROGRESS_S = 0.25
TYPED = frozenset({"responses", "messages"})
MAX_WHOLE_BYTES = 1 << 20  # a whole reply up to this size is held, so that a broken one can be retried


class Flight:
    """See the module. Created by the surface, owned by the driver until it ends."""

    __slots__ = (
        "_assembler",
        "_buffer",
        "_buffered",
        "_events",
        "_gaps",
        "_passing",
        "_progress_events",
        "_progress_s",
        "_scanner",
        "_token_s",
        "_usage_is_ours",
        "client_request",
        "dispatched_s",
        "ended",
        "endpoint",
        "exchange",
        "external_id",
        "first_token_s",
        "head",
        "headers",
        "id",
        "legs",
        "path",
        "record",
        "responder",
        "routed",
        "salt",
        "surface",
    )

    def __init__(
        self,
        surface: Surface,
        responder: Responder,
        client_request: ClientRequest,
        routed: RoutedRequest,
        path: str,
        headers: bytes,
        salt: bytes | None,
    ) -> None:
        self.surface = surface
        self.responder = responder
        self.client_request = client_request
        self.routed = routed
        self.id = routed.id
        self.path = path
        self.headers = headers
        self.salt = salt
        self.legs: Legs | None = None
        self.endpoint: Endpoint | None = None
        self.exchange: Exchange | None = None
        self.head: ReplyHead | None = None
        self.record: DecisionRecord | None = None
        self.ended = False
        self.dispatched_s: float | None = None
        self.first_token_s: float | None = None
        responder.on_disconnect = self.client_gone

    def _clear(self) -> None:
        self.head = None
        self._scanner: SseScanner | None = None
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._passing = self._usage_is_ours = False
        self._progress_s = 0.0
        self._progress_events = 0
        self._token_s = 0.0
        self._events = 0
        self._gaps: Histogram  # of a stream, from its first token on
        self._assembler: Assembler | None = None

    # the Router's orders

    def dispatch(self, action: Dispatch) -> None:
        """Sends the request, or a leg of it, to its instance."""
        self._clear()
        self.first_token_s = None
        if self.legs is None and action.leg != "whole":
            self.legs = Legs(self)
        if self.legs is not None:
            self.legs.begin(action)
        if self.legs is not None and action.leg == "prefill":
            self.legs.send_prefill(action)
        else:
            self._send(action)
        self.surface.driver.feed(RequestDispatched(request_id=self.id))

    def _send(self, action: Dispatch) -> None:
        driver = self.surface.driver
        endpoint = self.endpoint = driver.endpoints[action.instance]
        body, self._usage_is_ours = endpoint.edit(self.client_request, action.priority, action.max_tokens, self.salt)
        if endpoint.adapter.streams_whole and not self.client_request.stream:
            body = self._ask_for_stream(body)
        if self.legs is not None and action.leg != "whole":
            if action.leg == "decode" and self.legs.too_old():
                self.endpoint = self.source or endpoint  # who should decode it is not to blame
                driver.feed(self.failed_event("prefill_lease_over", retriable=True))
                return
            decode = self.legs.start_pair(action, body) if action.leg == "both" else self.legs.take(body)
            if decode is None:
                return
            body = decode
        self.post(endpoint, body)

    def _ask_for_stream(self, body: bytes) -> bytes:
        if self.client_request.endpoint not in ASSEMBLED:
            return body
        self._assembler = Assembler()
        return stream_body(body)

    def post(self, endpoint: Endpoint, body: bytes) -> None:
        """Sends the request, or its decode leg, as `body`."""
        self.endpoint = endpoint
        endpoint.running += 1
        self.dispatched_s = self.surface.driver.now()
        payload = endpoint.request_bytes(self.path, body, self.id, self.headers)
        self.exchange = endpoint.open().send(payload, self, self.legs is not None and self.legs.tied)

    def reject(self, action: Reject) -> None:
        """Answers the client with the Router's refusal."""
        self.detach()
        if not self._end("rejected", detail=action.reason):
            return
        status, retry_after_s = action.status, action.retry_after_s
        if action.reason == "no_instance":
            retry_after_s = self.surface.health.recovery_s(self.routed.model, retry_after_s)
        if status == 502 and self.head is not None and self.head.status in (429, 503):
            status = 503  # every engine was busy, none was broken
        send_reject(
            self.responder, status, action.reason, retry_after_s, self.surface.rng, self.surface.id_header(self.id)
        )

    def abort(self, reason: str) -> None:
        """Stops the running attempt: its instance is gone."""
        if not self.ended:
            self.detach()
            self.attempt_failed(reason)

    def break_off(self) -> None:
        """The gateway itself failed at it. The client is told, or where its reply has begun its connection is cut."""
        try:
            if self.ended or self.responder.started:
                self.detach()
            else:
                self.reject(Reject(request_id=self.id, status=500, reason="internal_error"))
        finally:
            self._end("failed", detail="internal_error", output_tokens=self._streamed())
            if not self.responder.finished:
                self.responder.abort()

    def client_gone(self) -> None:
        """The client disconnected: the engine must hear of it at once."""
        self.surface.driver.drain()  # its arrival may still wait there
        if self.ended:
            return
        try:
            self.detach()
        finally:  # or it would be live for ever
            self._end("cancelled", output_tokens=self._streamed())
            self.surface.driver.feed(RequestCancelled(request_id=self.id))

    # the engine's reply

    def on_head(self, head: ReplyHead) -> None:
        """The reply begins; nothing goes to the client yet."""
        self.head = head
        kind = head.header(b"content-type") or b""
        if head.status != 200 or not kind.startswith(b"text/event-stream"):
            self._assembler = None
        elif self._assembler is None:
            typed = self.routed.endpoint in TYPED
            self._scanner = SseScanner(strip_usage=self._usage_is_ours, typed=typed)

    def on_data(self, data: bytes) -> None:
        """Bytes of the reply: a stream goes on at once, a whole reply is held until it is complete."""
        scanner = self._scanner
        if scanner is None:
            self._hold(data)
            return
        try:
            out = scanner.feed(data)
        except ValueError as error:
            self._cut(BadReply(str(error), reply_begun=True))
            return
        responder = self.responder
        if out:
            if responder.started:
                responder.write(out)
            else:
                self._start(out)
        if self.first_token_s is None:
            if scanner.tokens_seen:
                self._first_token()
                assert self.endpoint is not None
                self._gaps = self.surface.stats.gaps.histogram((self.routed.model, self.endpoint.name))
                self._token_s, self._events = self._progress_s, scanner.events
        elif (events := scanner.events) > self._events:
            now = time.monotonic()
            self._gaps.observe_gap(now - self._token_s, events - self._events)
            self._token_s, self._events = now, events
            if now - self._progress_s >= PROGRESS_S:
                self._progress_s, self._progress_events = now, events
                self.surface.driver.feed(TokensProgressed(request_id=self.id, output_tokens=events))

    def on_end(self) -> None:
        """The reply is complete as HTTP; whether it is as a completion is decided here."""
        self._release()
        if self.legs is not None and self.legs.running:  # of a pair that began together: its reply carries nothing more
            self.detach()
        scanner = self._scanner
        assert self.head is not None
        if scanner is None:
            self._whole()
            return
        tail = scanner.flush()
        if scanner.error is not None:
            self._forwarded_error(tail)
        elif not (scanner.done or scanner.finish):
            self.attempt_failed("truncated")
        else:
            self.responder.end(tail)
            self._finished(usage_of(scanner.usage), scanner.events)

    def on_fail(self, error: ExchangeFailed) -> None:
        """The connection or the framing broke."""
        endpoint = self.endpoint
        assert endpoint is not None
        self.detach()
        if isinstance(error, ConnectFailed):
            self.surface.health.connect_failed(endpoint)
        self.attempt_failed(type(error).__name__)

    # inside: streams

    def _start(self, data: bytes) -> None:
        assert self.head is not None
        lines = reply_lines(self.head, self.id, stream=True) + self.surface.explain(self)
        self._follow_reader()
        self.responder.start_raw(self.head.status, lines, None, data)

    def _first_token(self) -> None:
        driver = self.surface.driver
        self.first_token_s = driver.now()
        self._progress_s = time.monotonic()
        driver.feed(FirstToken(request_id=self.id))

    def _forwarded_error(self, tail: bytes) -> None:
        """The engine sent its own error frame, which the client has received once."""
        if self.responder.started:
            self.responder.end(tail)
            self.failed("error_frame")
        else:  # withheld with an unfinished frame: nothing was sent
            self.attempt_failed("error_frame")

    # inside: whole replies

    def _gather(self, data: bytes, assembler: Assembler) -> None:
        """Frames of what will be a whole reply: nothing goes to the client, the Router hears of their progress."""
        try:
            assembler.feed(data)
        except ValueError as error:
            self._cut(BadReply(str(error), reply_begun=True))
            return
        now = time.monotonic()
        if assembler.frames and self.first_token_s is None:
            self._first_token()
        elif assembler.frames > self._progress_events and now - self._progress_s >= PROGRESS_S:
            self._progress_s, self._progress_events = now, assembler.frames
            self.surface.driver.feed(TokensProgressed(request_id=self.id, output_tokens=assembler.frames))

    def _assembled(self, assembler: Assembler) -> None:
        assert self.head is not None
        if not assembler.complete:
            self.attempt_failed("error_frame" if assembler.error else "truncated")
            return
        body = assembler.body()
        lines = assembled_lines(self.head, self.id) + self.surface.explain(self)
        self.responder.send_raw(200, lines, body)
        self._finished(usage_of_body(body), assembler.frames)

    def _hold(self, data: bytes) -> None:
        if self._assembler is not None:
            self._gather(data, self._assembler)
            return
        if self._passing:
            self.responder.write(data)
            return
        self._buffer.append(data)
        self._buffered += len(data)
        if self._buffered > MAX_WHOLE_BYTES:
            assert self.head is not None
            if self.head.status >= 400:
                self._cut(BadReply("an error reply is too large", reply_begun=True))
                return
            self._passing = True
            lines = reply_lines(self.head, self.id) + self.surface.explain(self)
            self._follow_reader()
            self.responder.start_raw(self.head.status, lines, self.head.length, b"".join(self._buffer))
            self._buffer = []

    def _whole(self) -> None:
        head = self.head
        assert head is not None
        if self._assembler is not None:
            self._assembled(self._assembler)
            return
        if self._passing:
            self.responder.end()
            self._finished(NONE_TOLD, 0)
            return
        pieces = self._buffer
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if head.status < 400:
            lines = reply_lines(head, self.id) + self.surface.explain(self)
            self.responder.send_raw(head.status, lines, body)
            self._finished(usage_of_body(body), 0)
        elif head.status in FORWARDED_ERRORS:
            # the request is at fault, the engine is fine: the client gets the engine's own words
            self.responder.send_raw(*read_client_error(head, body, self.id))
            self.failed(f"client_error_{head.status}")
        else:
            self.attempt_failed(f"status_{head.status}")

    # inside: ends

    def attempt_failed(self, reason: str) -> None:
        """The engine failed. The Router decides about another try if the client has seen nothing."""
        assert self.endpoint is not None
        if self.legs is not None:
            self.legs.give_up_kv()
        self.surface.attempt_failed(self, reason)
        self.surface.health.request_failed(self.endpoint, reason)
        if not self.responder.started:
            if self.surface.budget.take():
                self.surface.driver.feed(self.failed_event(reason, retriable=True))
            else:
                self._give_up(reason)
            return
        if self._scanner is not None:
            self.responder.end(error_frame(self._scanner.partial))
        else:
            self.responder.abort()
        self.failed(reason)

    def _give_up(self, reason: str) -> None:
        """No try is left in the fleet's retry budget: most of the fleet is failing, and more load would not help."""
        event = self.failed_event(reason, retriable=False)
        if self._end("rejected", detail="retry_budget"):
            rng, names = self.surface.rng, self.surface.id_header(self.id)
            send_reject(self.responder, 503, "retry_budget", 1.0, rng, names)
            self.surface.driver.feed(event)

    def failed_event(self, reason: str, *, retriable: bool) -> RequestFailed:
        """What the Router is told of an attempt that went wrong."""
        assert self.endpoint is not None
        return RequestFailed(request_id=self.id, instance=self.endpoint.name, reason=reason, retriable=retriable)

    def _cut(self, error: ExchangeFailed) -> None:
        """Gives up an exchange whose reply cannot be used."""
        self.detach()
        self.attempt_failed(type(error).__name__)

    def failed(self, reason: str) -> None:
        """The request ends badly and nothing more is tried."""
        assert self.endpoint is not None
        outcome = "client_error" if reason.startswith("client_error") else "failed"
        if self._end(outcome, detail=reason, output_tokens=self._streamed()):
            self.surface.driver.feed(self.failed_event(reason, retriable=False))

    def _streamed(self) -> int:
        """Output that the client has received so far: leaving early is not a way to use engines for nothing."""
        scanner = getattr(self, "_scanner", None)  # there is none before the first dispatch
        return 0 if scanner is None else scanner.events

    @property
    def output_tokens(self) -> int:
        """Output that the engine has sent so far, as frames tell it."""
        assembler = getattr(self, "_assembler", None)
        return self._streamed() if assembler is None else assembler.frames

    def _finished(self, usage: Usage, frames: int) -> None:
        output = usage.output_tokens if usage.output_tokens is not None else frames
        legs, computed = self.legs, self.source or self.endpoint
        if not self._end("ok", usage=usage, output_tokens=output):
            return
        assert self.endpoint is not None
        assert computed is not None
        if legs is not None:
            legs.used()
        self.surface.health.request_succeeded(self.endpoint)
        self.surface.learn(self, usage)
        if computed.kv is not None:
            computed.kv.answered(self, usage)
        event = RequestFinished(
            request_id=self.id,
            output_tokens=output,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
        )
        self.surface.driver.feed_soon(event)

    def _end(self, outcome: str, detail: str = "", usage: Usage | None = None, output_tokens: int = 0) -> bool:
        """Marks the one end; False if it had come already."""
        if self.ended:
            return False
        self.ended = True
        self.surface.ended(self, outcome, detail, usage or NONE_TOLD, output_tokens)
        self.legs = None  # each refers to the other: together they would wait for the collector
        return True

    @property
    def source(self) -> Endpoint | None:
        """Who computed the prompt, where that is not `endpoint`."""
        return None if self.legs is None else self.legs.source

    def detach(self) -> None:
        """Lets go of the engines: what runs there for this request is cut."""
        if self.legs is not None:
            self.legs.stop()
        if self.exchange is not None:
            exchange = self.exchange
            self._release()
            exchange.cancel()

    def _release(self) -> None:
        if self.exchange is not None:
            self.exchange = None
            assert self.endpoint is not None
            self.endpoint.running -= 1

    def _follow_reader(self) -> None:
        """From here on the engine sends no faster than the client reads."""
        responder = self.responder
        responder.on_pause, responder.on_resume = self._pause, self._resume
        if responder.paused:
            self._pause()

    def _pause(self) -> None:
        if self.exchange is not None:
            self.exchange.pause()

    def _resume(self) -> None:
        if self.exchange is not None:
            self.exchange.resume()
