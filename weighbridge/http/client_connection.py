"""One client connection: at most one exchange at a time, the reply handed to a sink as it arrives."""

import asyncio
import re
from typing import TYPE_CHECKING, Final, Protocol

from weighbridge.http.chunked import ChunkedDecoder
from weighbridge.http.errors import BadReply, ConnectionCut, ExchangeFailed, ReplyTimeout
from weighbridge.http.reply_head import KnownReply, ReplyHead

if TYPE_CHECKING:
    from weighbridge.http.pool import Pool

IDLE: Final = 0
HEAD: Final = 1
LENGTH: Final = 2
CHUNKED: Final = 3
UNTIL_EOF: Final = 4
CLOSED: Final = 5

# Header block of a reply: token, colon, visible bytes and blanks; no folding, no bare CR, LF or NUL.
_FIELDS = re.compile(rb"(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*)*")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_KEEP_TIMEOUT = re.compile(rb"timeout=(\d{1,6})")


class Sink(Protocol):
    """Receives one reply: `on_head` once, `on_data` any number of times, then `on_end` or `on_fail` once.

    `on_fail` may come without `on_head`. Nothing is called after the exchange was cancelled.
    """

    def on_head(self, head: ReplyHead) -> None:
        """The head has arrived (interim 1xx heads are skipped)."""

    def on_data(self, data: bytes) -> None:
        """De-chunked body bytes of one read."""

    def on_end(self) -> None:
        """The reply is complete."""

    def on_fail(self, error: ExchangeFailed) -> None:
        """The reply will not be completed."""


class Exchange:
    """A request on its way: cancel it, or pause its reply."""

    __slots__ = ("cancelled", "connection", "payload", "resent", "sent_s", "sink")

    def __init__(self, payload: bytes, sink: Sink) -> None:
        self.payload = payload
        self.sink = sink
        self.connection: ClientConnection | None = None
        self.cancelled = False
        self.resent = False
        self.sent_s = 0.0

    def cancel(self) -> None:
        """Gives the exchange up; the server sees its connection close."""
        self.cancelled = True
        if self.connection is not None:
            self.connection.drop()

    def pause(self) -> None:
        """Stops reading the reply, so that TCP slows the server down."""
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Reads on."""
        if self.connection is not None:
            self.connection.resume()


class ClientConnection:
    """A kept-alive connection of a pool. An `asyncio.Protocol` by its methods, see `ServerConnection`."""

    __slots__ = (
        "_begun",
        "_carry",
        "_decoder",
        "_left",
        "_paused",
        "_reusable",
        "deadline",
        "exchange",
        "idle_limit_s",
        "idle_since",
        "pool",
        "state",
        "transport",
        "uses",
    )

    def __init__(self, pool: "Pool") -> None:
        self.pool = pool
        self.transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self.state = IDLE
        self.deadline = 0.0
        self.idle_since = 0.0
        self.idle_limit_s = pool.limits.idle_s
        self.uses = 0
        self._reset()

    def _reset(self) -> None:
        self._carry = b""
        self._left = 0
        self._decoder: ChunkedDecoder | None = None
        self._begun = False
        self._reusable = True
        self._paused = False

    def begin(self, exchange: Exchange) -> None:
        """Sends the exchange's request."""
        self._reset()
        self.exchange = exchange
        exchange.connection = self
        self.state = HEAD
        self.uses += 1
        now = self.pool.clock()
        exchange.sent_s = now
        self.deadline = now + self.pool.limits.head_s
        assert self.transport is not None
        self.pool.loop_pass.write(self.transport, exchange.payload)

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.idle_since = self.pool.clock()
        if self.pool.closed:
            self._abort()
        else:
            self.pool.connections.add(self)

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self._abort()  # bytes outside an exchange: the server is out of step
            return
        self.deadline = self.pool.now + self.pool.read_s
        if self.state == HEAD:
            self._begun = True
            self._read_head(data)
        else:
            self._read_body(data)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """Nothing to pause: a request is written in one piece."""

    def resume_writing(self) -> None:
        pass

    def connection_lost(self, exc: Exception | None) -> None:
        exchange, self.exchange = self.exchange, None
        state, self.state = self.state, CLOSED
        self.transport = None
        self.pool.gone(self)
        if exchange is None:
            return
        exchange.connection = None
        if state == UNTIL_EOF and exc is None:
            exchange.sink.on_end()
            return
        recently = self.pool.clock() - exchange.sent_s < self.pool.limits.resend_s
        if not self._begun and self.uses > 1 and recently and not exchange.resent:
            exchange.resent = True
            self.pool.dial(exchange)
            return
        where = "in the middle of its reply" if self._begun else "before it replied"
        exchange.sink.on_fail(ConnectionCut(f"the server closed the connection {where}", reply_begun=self._begun))

    # the reply

    def _read_head(self, data: bytes) -> None:
        exchange, known = self.exchange, self.pool.known_reply
        assert exchange is not None
        plain = not (self._carry or exchange.payload[:5] == b"HEAD ")
        if known is not None and plain:
            start = known.find(data)
            if start:
                self._reusable = known.reusable
                self.idle_limit_s = min(self.idle_limit_s, known.idle_limit_s)
                self._take_head(known.head, data[start:])
                return
        data = self._carry + data if self._carry else data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._carry = data
            if len(data) > self.pool.limits.max_head_bytes:
                self.fail(BadReply("the reply's head is too large", reply_begun=True))
            return
        self._carry = b""
        try:
            head = self._parse_head(data[:end])
        except ValueError as error:
            self.fail(BadReply(str(error), reply_begun=True))
            return
        rest = data[end + 4 :]
        if head.status < 200:
            if head.status == 101:
                self.fail(BadReply("the server switched protocols", reply_begun=True))
            elif rest:
                self._read_head(rest)
            return
        if plain and head.status == 200:
            self.pool.known_reply = KnownReply(data[: end + 4], head, self._reusable, self.idle_limit_s)
        self._take_head(head, rest)

    def _take_head(self, head: ReplyHead, rest: bytes) -> None:
        """The head has arrived, and `rest` with it."""
        exchange = self.exchange
        assert exchange is not None
        self._frame(head, exchange)
        exchange.sink.on_head(head)
        if self.exchange is not exchange:
            return  # the sink gave it up
        if rest or (self.state == LENGTH and self._left == 0):
            self._read_body(rest)

    def _parse_head(self, head: bytes) -> ReplyHead:
        line_end = head.find(b"\r\n")
        line = head if line_end < 0 else head[:line_end]
        status = _STATUS.fullmatch(line)
        if status is None:
            raise ValueError("malformed status line")
        if line_end >= 0 and _FIELDS.fullmatch(head, line_end) is None:
            raise ValueError("malformed header")
        headers = []
        if line_end >= 0:
            for field in head[line_end + 2 :].split(b"\r\n"):
                name, _, value = field.partition(b":")
                headers.append((name.lower(), value.strip(b" \t")))
        reply = ReplyHead(int(status[2]), headers)
        self._reusable = status[1] == b"1"
        self._read_framing(reply)
        return reply

    def _read_framing(self, head: ReplyHead) -> None:
        for name, value in head.headers:
            if name == b"content-length":
                if not value.isdigit() or len(value) > 15 or (head.length is not None and head.length != int(value)):
                    raise ValueError("malformed Content-Length")
                head.length = int(value)
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked" or head.chunked:
                    raise ValueError("unknown transfer coding")
                head.chunked = True
            elif name == b"connection" and b"close" in value.lower():
                self._reusable = False
            elif name == b"keep-alive" and (found := _KEEP_TIMEOUT.search(value)):
                self.idle_limit_s = min(self.pool.limits.idle_s, max(0.0, int(found[1]) - 1.0))
        if head.length is not None and head.chunked:
            raise ValueError("both Content-Length and a transfer coding")

    def _frame(self, head: ReplyHead, exchange: Exchange) -> None:
        if head.status in (204, 304) or exchange.payload[:5] == b"HEAD ":
            head.length = 0
            head.chunked = False
        if head.chunked:
            self.state = CHUNKED
            self._decoder = ChunkedDecoder()
        elif head.length is not None:
            self.state = LENGTH
            self._left = head.length
        else:
            self.state = UNTIL_EOF
            self._reusable = False

    def _read_body(self, data: bytes) -> None:
        exchange = self.exchange
        assert exchange is not None
        ended = False
        if self.state == CHUNKED:
            decoder = self._decoder
            assert decoder is not None
            try:
                data = decoder.feed(data)
            except ValueError as error:
                self.fail(BadReply(str(error), reply_begun=True))
                return
            ended = decoder.done
            if decoder.rest:
                self._reusable = False
        elif self.state == LENGTH:
            if len(data) > self._left:
                data = data[: self._left]
                self._reusable = False
            self._left -= len(data)
            ended = self._left == 0
        if data:
            exchange.sink.on_data(data)
        if ended and self.exchange is exchange:
            self._finish(exchange)

    def _finish(self, exchange: Exchange) -> None:
        self.exchange = None
        exchange.connection = None
        self.state = IDLE
        if self._paused:
            self.resume()
        if self._reusable and self.transport is not None and not self.transport.is_closing():
            self.pool.give_back(self)
        elif self.transport is not None:
            self.transport.close()
        exchange.sink.on_end()

    # endings

    def fail(self, error: ExchangeFailed) -> None:
        """Ends the exchange with an error and cuts the connection."""
        exchange, self.exchange = self.exchange, None
        self._abort()
        if exchange is not None:
            exchange.connection = None
            exchange.sink.on_fail(error)

    def drop(self) -> None:
        """Cuts the connection; its exchange hears nothing more."""
        if self.exchange is not None:
            self.exchange.connection = None
            self.exchange = None
        self._abort()

    def check(self, now: float) -> None:
        """Called about twice a second: enforces the deadlines."""
        if self.exchange is None:
            if self.state == IDLE and now - self.idle_since > self.idle_limit_s and self.transport is not None:
                self.transport.close()
        elif now > self.deadline and not self._paused:
            what = "did not go on with its reply" if self._begun else "did not reply"
            self.fail(ReplyTimeout(f"the server {what} in time", reply_begun=self._begun))

    def pause(self) -> None:
        """Stops reading."""
        if not self._paused and self.transport is not None:
            self._paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """Reads on."""
        if self._paused and self.transport is not None:
            self._paused = False
            self.deadline = self.pool.now + self.pool.read_s
            self.transport.resume_reading()

    def _abort(self) -> None:
        self.state = CLOSED
        if self.transport is not None:
            self.transport.abort()
