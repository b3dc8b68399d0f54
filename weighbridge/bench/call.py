"""One request on the wire: a reply sink that times what arrives and ends in exactly one record."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from weighbridge.bench.frames import FrameReader
from weighbridge.bench.record import BenchRecord
from weighbridge.bench.schedule import Planned
from weighbridge.core.metrics import Status
from weighbridge.http import Exchange, ExchangeFailed, ReplyHead, ReplyTimeout

MAX_BODY_BYTES = 16 * 1024 * 1024
REJECTED = (429, 503)
TIMED_OUT = (408, 504)
ROUTER_PREFIX = b"x-weighbridge-"
clock = time.monotonic


class Call:
    """Counts seconds from `start`, the run's time 0 on the monotonic clock. `on_done` is called once with the record.

    `gaps` collects the seconds between consecutive frames that carried tokens; the first token opens no gap.
    """

    __slots__ = (
        "_body", "_content", "_exchange", "_first_byte", "_first_token", "_frames", "_head", "_last", "_longest",
        "_on_done", "_reader", "_start", "ended", "gaps", "lag", "planned", "sent",
    )  # fmt: skip

    def __init__(
        self,
        planned: Planned,
        start: float,
        gaps: array[float],
        on_done: Callable[[Call, BenchRecord], None],
        stream: bool = True,
    ) -> None:
        self.planned, self.gaps = planned, gaps
        self._start, self._on_done = start, on_done
        self._reader = FrameReader() if stream else None
        self._body = b""
        self._head: ReplyHead | None = None
        self._exchange: Exchange | None = None
        self._first_byte = self._first_token = self._content = self._last = 0.0
        self._longest = 0.0
        self._frames = 0
        self.sent = self.lag = 0.0
        self.ended = False

    def started(self, exchange: Exchange, sent: float, lag: float) -> None:
        """The request was handed to the network at `sent` (monotonic), `lag` seconds later than it should have."""
        self._exchange, self.sent, self.lag = exchange, sent, lag

    @property
    def has_token(self) -> bool:
        """Whether any generated token has arrived."""
        return self._first_token > 0.0

    # reply sink

    def on_head(self, head: ReplyHead) -> None:
        self._head = head
        self._first_byte = clock()

    def on_data(self, data: bytes) -> None:
        head = self._head
        if self._reader is None or head is None or head.status != 200:
            if len(self._body) < MAX_BODY_BYTES:
                self._body += data
            return
        now = clock()
        tokens, visible = self._reader.feed(data)
        if not tokens:
            return
        if visible and not self._content:
            self._content = now
        if not self._first_token:
            self._first_token = now
        else:
            gap = now - self._last
            self.gaps.append(gap)
            if gap > self._longest:
                self._longest = gap
        if tokens > 1:
            # frames that came in one read arrived together
            self.gaps.extend([0.0] * (tokens - 1))
        self._last = now
        self._frames += tokens

    def on_end(self) -> None:
        head = self._head
        assert head is not None
        if head.status != 200:
            status: Status = "failed"
            if head.status in REJECTED:
                status = "rejected"
            elif head.status in TIMED_OUT:
                status = "timed_out"
            self._finish(status, f"HTTP {head.status}: {_message(self._body)}")
        elif self._reader is None:
            self._finish_whole()
        else:
            self._finish_stream(self._reader)

    def on_fail(self, error: ExchangeFailed) -> None:
        self._finish("timed_out" if isinstance(error, ReplyTimeout) else "failed", str(error))

    # ends that the client decides

    def give_up(self, status: Status, reason: str) -> None:
        """Close the connection and end with `status`; nothing happens when the call has ended already."""
        if self.ended:
            return
        if self._exchange is not None:
            self._exchange.cancel()
        self._finish(status, reason)

    def _finish_stream(self, reader: FrameReader) -> None:
        if reader.error is not None:
            self._finish("failed", f"error frame: {_message_of(reader.error)}")
        elif reader.malformed:
            self._finish("failed", f"malformed stream: {reader.malformed}")
        elif not (reader.done or reader.finish):
            self._finish("failed", "the stream ended without a finish reason or [DONE]")
        else:
            self._finish("ok", "")

    def _finish_whole(self) -> None:
        now = clock()
        try:
            reply = msgspec.json.decode(self._body)
            choices = reply["choices"]
            self._reader = FrameReader()
            self._reader.usage = reply.get("usage")
            self._reader.finish = str(choices[0].get("finish_reason") or "")
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError):
            self._finish("failed", "malformed reply: no completion object")
            return
        self._last = now
        self._finish("ok", "")

    def _finish(self, status: Status, reason: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._exchange = None
        planned, reader, head = self.planned, self._reader, self._head
        usage = (reader.usage if reader is not None else None) or {}
        tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        record = BenchRecord(
            id=planned.id,
            scheduled_s=planned.at_s,
            status=status,
            prompt_tokens=_whole(usage.get("prompt_tokens"), planned.prompt_tokens),
            output_tokens=_whole(tokens, self._frames),
            cached_tokens=_whole(cached, 0),
            sent_s=self._since(self.sent),
            first_token_s=self._since(self._first_token),
            last_token_s=self._since(self._last),
            tier=planned.tier or "standard",
            tenant=planned.tenant,
            error=reason,
            first_byte_s=self._since(self._first_byte),
            first_content_s=self._since(self._content),
            ended_s=clock() - self._start,
            lag_s=self.lag,
            frames=self._frames,
            longest_gap_s=self._longest,
            tokens_from="usage" if isinstance(tokens, int) else "frames",
            http_status=head.status if head is not None else 0,
            finish_reason=reader.finish if reader is not None else "",
            wanted_prompt_tokens=planned.prompt_tokens,
            wanted_output_tokens=planned.output_tokens,
            kind=planned.kind,
            warmup=planned.warmup,
            router=_router(head),
        )
        record.instance = str(record.router.get("instance", "")) or _chosen(record.router.pop("decision", ""))
        self._on_done(self, record)

    def _since(self, moment: float) -> float | None:
        return moment - self._start if moment else None


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _router(head: ReplyHead | None) -> dict[str, float | str]:
    """Our gateway's own reply headers, without their prefix; numbers as numbers."""
    out: dict[str, float | str] = {}
    if head is None:
        return out
    for name, value in head.headers:
        if name.startswith(ROUTER_PREFIX):
            text = value.decode("latin-1")
            try:
                out[name[len(ROUTER_PREFIX) :].decode()] = float(text)
            except ValueError:
                out[name[len(ROUTER_PREFIX) :].decode()] = text
    return out


class _Decision(msgspec.Struct):
    chosen: str = ""


def _chosen(decision: float | str) -> str:
    """The instance in a decision that our gateway explained; empty where it is none."""
    try:
        return msgspec.json.decode(str(decision), type=_Decision).chosen
    except msgspec.MsgspecError:
        return ""


def _message(body: bytes) -> str:
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body[:200].decode("utf-8", "replace")
    return _message_of(decoded.get("error", decoded) if isinstance(decoded, dict) else decoded)


def _message_of(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:200]
