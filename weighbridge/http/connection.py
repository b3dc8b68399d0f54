"""One accepted connection: llhttp for the framing, our own rules on top, requests answered strictly in order.

Longer than 400 lines because the parser's callbacks, the phases they move between and every ending belong together.

llhttp refuses Content-Length beside Transfer-Encoding, duplicate or malformed lengths, obs-fold, bare CR or LF and
malformed chunks. Here in addition: any transfer coding but `chunked`, HTTP/1.0 with chunks, a missing or second
Host, CONNECT, caps on the head, the body and the number of headers, and a deadline for each part.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import httptools

from weighbridge.http.envelope import error_body
from weighbridge.http.known_head import KnownRequest, learn
from weighbridge.http.request import Head, Request
from weighbridge.http.responder import Responder, status_line
from weighbridge.http.turns import LARGE_BYTES

if TYPE_CHECKING:
    from weighbridge.http.server import HttpServer

AWAIT: Final = 0
HEAD: Final = 1
BODY: Final = 2
LINGER: Final = 3
CLOSED: Final = 4
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LINGER_S = 2.0
TLS_BUFFER_BYTES = 64 * 1024
FRAMING = frozenset({b"host", b"content-length", b"transfer-encoding", b"expect", b"upgrade"})


class _Refused(Exception):
    """Raised inside a parser callback to stop parsing; the answer is in `ServerConnection._fault`."""


class ServerConnection:
    """Parses requests, hands them over one at a time and guards every wait.

    An `asyncio.Protocol` by its methods; it does not inherit from it because a compiled class must not.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_expects",
        "_fault",
        "_head_bytes",
        "_headers",
        "_hosts",
        "_known",
        "_length",
        "_paused_at",
        "_paused_size",
        "_peer",
        "_phase",
        "_pumping",
        "_put_in",
        "_queue",
        "_read",
        "_request",
        "_served",
        "_target",
        "_te",
        "_upgrade",
        "active",
        "deadline",
        "parser",
        "server",
        "transport",
    )

    def __init__(self, server: "HttpServer") -> None:
        self.server = server
        self.transport: asyncio.Transport | None = None
        self.parser: Any = None
        self.active: Responder | None = None
        self.deadline = 0.0
        self._phase = AWAIT
        self._queue: deque[Request] = deque()
        self._pumping = False
        self._put_in = 0
        self._fault: tuple[int, str] | None = None
        self._head_bytes = 0
        self._paused_size = -1
        self._paused_at = 0.0
        self._peer = ""
        self._served = False
        self._known: KnownRequest | None = None
        self._reset()

    def _reset(self) -> None:
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._request: Request | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._length = -1
        self._read = b""
        self._te = self._expects = self._upgrade = False
        self._hosts = 0

    # asyncio callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]
        self.parser = httptools.HttpRequestParser(self)
        self.deadline = self.server.now + self.server.limits.head_s
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        size = self.server.limits.write_buffer_bytes
        if transport.get_extra_info("ssl_object") is not None:  # a TLS transport takes 0 for always full
            size = max(size, TLS_BUFFER_BYTES)
        self.transport.set_write_buffer_limits(high=size, low=size // 4)  # type: ignore[union-attr]
        self.server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._phase >= LINGER:
            return
        if self._phase == AWAIT:
            if self._known is not None:
                request = self._known.take(data, self.server.clock())
                if request is not None and self._take(request):
                    return
            if self._served:
                self._read = data
            self._phase = HEAD
            self._head_bytes = 0
            self.deadline = self.server.now + self.server.limits.head_s
        if self._phase == HEAD:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._phase < LINGER:
                self._refuse(*(self._fault or (400, f"Malformed HTTP request: {error}.")))
            return
        if self._phase == HEAD and self._head_bytes > self.server.limits.max_head_bytes:
            self._refuse(431, "The request head is too large.")
        elif self._phase == BODY and self._body_bytes > LARGE_BYTES and self.transport is not None:
            self.transport.pause_reading()
            self.server.turns.wait(self)

    def _take(self, request: Request) -> bool:
        """Takes a request that needed no parser. False: it is too large, or there is no room for it."""
        server, size = self.server, len(request.body)
        room = min(server.limits.max_body_bytes, server.limits.max_buffered_bytes - server.buffered_bytes)
        if size > min(room, LARGE_BYTES):
            return False
        refusal = None if server.admit is None else server.admit(request)
        if refusal is not None:
            self._refuse(*refusal)
            return True
        server.buffered_bytes += size
        self._submit(request)
        return True

    def eof_received(self) -> bool:
        if self.active is not None:  # a half-close is a disconnect, as it is for the engines
            self.active.lost()
            self.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._phase = CLOSED
        self.server.buffered_bytes -= self._body_bytes + sum(len(r.body) for r in self._queue)
        self._body_bytes = 0
        self._queue.clear()
        active, self.active = self.active, None
        if active is not None:
            self.server.buffered_bytes -= len(active.request.body)
            active.lost()
        self.parser = self.transport = None
        self.server.closed(self)

    def pause_writing(self) -> None:
        self._paused_at = self.server.now
        self._paused_size = self.transport.get_write_buffer_size() if self.transport else 0
        if self.active is not None:
            self.active.pause()

    def resume_writing(self) -> None:
        self._paused_size = -1
        if self.active is not None:
            self.active.resume()

    # parser callbacks

    def on_message_begin(self) -> None:
        if self._phase != HEAD:  # a pipelined request that arrived with its predecessor
            self._phase = HEAD
            self._head_bytes = 0
            self.deadline = self.server.now + self.server.limits.head_s

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase != HEAD:
            return  # a trailer
        name = name.lower()
        headers = self._headers
        headers.append((name, value))
        if len(headers) > self.server.limits.max_headers:
            self._stop(431, "The request has too many headers.")
        if name not in FRAMING:
            return
        if name == b"host":
            self._hosts += 1
        elif name == b"content-length":
            self._length = int(value)
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked" or self._te:
                self._stop(400, "The only transfer coding understood here is chunked.")
            self._te = True
        elif name == b"expect":
            if value.lower() != b"100-continue":
                self._stop(417, "The only expectation understood here is 100-continue.")
            self._expects = True
        elif name == b"upgrade":
            self._upgrade = True

    def on_headers_complete(self) -> None:
        parser, limits = self.parser, self.server.limits
        version = parser.get_http_version()
        method = parser.get_method().decode("ascii")
        if version not in ("1.1", "1.0"):
            self._stop(505, "Use HTTP/1.1.")
        if method == "CONNECT":
            self._stop(405, "CONNECT is not offered here.")
        if self._te and version == "1.0":
            self._stop(400, "HTTP/1.0 has no chunked bodies.")
        if self._hosts > 1 or (self._hosts == 0 and version == "1.1"):
            self._stop(400, "A request needs exactly one Host header.")
        # without `Connection: upgrade` the header means nothing, and the parser will not stop for it
        self._upgrade = self._upgrade and parser.should_upgrade()
        keep_alive = parser.should_keep_alive() or self._upgrade
        head = Head(method, self._target, self._headers, version=version, keep_alive=keep_alive, peer=self._peer)
        request = self._request = Request(head, self.server.clock())
        if self._length > 0 or self._te:
            self._phase = BODY
            if self._length > limits.max_body_bytes:
                self._stop(413, f"The body is larger than {limits.max_body_bytes} bytes.")
            self.deadline = self.server.now + limits.body_s
            self._admit(request)

    def _admit(self, request: Request) -> None:
        if self.server.admit is not None:
            refusal = self.server.admit(request)
            if refusal is not None:
                self._stop(*refusal)
        if self._expects and request.version == "1.1" and self.active is None and self.transport is not None:
            self.put(CONTINUE)  # behind an answer that waits to be written

    def on_body(self, data: bytes) -> None:
        self._body.append(data)
        size = len(data)
        self._body_bytes += size
        self.server.buffered_bytes += size
        if self._body_bytes > self.server.limits.max_body_bytes:
            self._stop(413, f"The body is larger than {self.server.limits.max_body_bytes} bytes.")
        if self.server.buffered_bytes > self.server.limits.max_buffered_bytes:
            self._stop(503, "The server holds too many request bodies; try again shortly.")

    def on_message_complete(self) -> None:
        request = self._request
        if request is None or self._upgrade:
            return
        pieces = self._body
        request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._phase = AWAIT
        if self._read and 0 < self._length == len(request.body) and request.keep_alive and not self._expects:
            self._known = learn(request, self._read)
        self._reset()
        self._submit(request)

    # requests in order

    def _submit(self, request: Request) -> None:
        self._queue.append(request)
        if self.active is None:
            self._pump()
        elif len(self._queue) >= self.server.limits.max_pipelined and self.transport is not None:
            self.transport.pause_reading()

    def take_turn(self, waited_s: float) -> bool:
        """Goes on with a large body: hands it over, or reads more of it. False: the connection is gone."""
        self.deadline += waited_s
        self._pump(turn=True)
        if self._phase == BODY and self.transport is not None:
            self.transport.resume_reading()
        return self.transport is not None

    def _pump(self, turn: bool = False) -> None:
        if self._pumping:
            return
        self._pumping = True
        while self._queue and self.active is None and self._phase != CLOSED:
            if len(self._queue[0].body) > LARGE_BYTES and not turn:
                self.server.turns.wait(self)
                break
            turn = False
            request = self._queue.popleft()
            if self._queue and len(self._queue) == self.server.limits.max_pipelined - 1 and self.transport is not None:
                self.transport.resume_reading()
            responder = Responder(self, request)
            self.active = responder
            try:
                work = self.server.handler(request, responder)
                if work is not None:
                    responder.run(work)
            except Exception as error:  # a handler's bug must not take the connection's other requests with it
                self.server.report_crash(request, error)
                if responder.started:
                    responder.abort()
                else:
                    responder.send_error(500, "The server failed to answer this request.")
        self._pumping = False

    def answered(self, responder: Responder) -> None:
        """The active response has ended."""
        self.active = None
        self._served = True  # only a connection that is used again is worth remembering heads
        self.server.buffered_bytes -= len(responder.request.body)
        self.server.answered(responder)
        if not responder.request.keep_alive:
            self._close()
            return
        if self._phase == AWAIT:
            self.deadline = self.server.now + self.server.limits.idle_s
        if self._queue:
            self._pump()
        elif self._phase == LINGER and self._fault is not None:
            self._refuse(*self._fault)

    def put(self, data: bytes, at_once: bool = False) -> None:
        """Writes response bytes, already framed: at the end of the loop's pass, or at once what somebody waits for."""
        transport, current = self.transport, self.server.loop_pass
        if transport is None:
            return
        if current is None:
            transport.write(data)
        elif at_once:
            if self._put_in == current.number:
                current.flush()
            transport.write(data)
        else:
            self._put_in = current.number
            current.write(transport, data)

    # endings

    def abort(self) -> None:
        """Cuts the connection now."""
        if self.transport is not None:
            self.transport.abort()

    def _close(self) -> None:
        """Closes once everything written has left, and in any case within the write deadline."""
        self._phase = CLOSED
        self.deadline = self.server.now + self.server.limits.write_s
        if self.transport is not None:
            self.server.flush()
            self.transport.close()

    def close_if_idle(self) -> bool:
        """Closes a connection that waits for its next request; True if it did."""
        if self.active is None and self._phase == AWAIT and not self._queue:
            self._close()
            return True
        return False

    def check(self, now: float) -> None:
        """Called about twice a second: enforces the deadlines."""
        if self._paused_size >= 0 and self.transport is not None:
            size = self.transport.get_write_buffer_size()
            if size < self._paused_size:
                self._paused_size, self._paused_at = size, now
            elif now - self._paused_at > self.server.limits.write_s:
                self.abort()
                return
        if self.active is not None or now < self.deadline or self in self.server.turns:
            return
        if self._phase in (HEAD, BODY):
            self._refuse(408, "The request did not arrive in time.")
        elif self._phase == AWAIT:
            self._close()
        else:
            self.abort()

    def _stop(self, status: int, message: str) -> None:
        self._fault = (status, message)
        raise _Refused

    def _refuse(self, status: int, message: str) -> None:
        """Answers and closes; what the client still sends is read and dropped, so that it can see the answer."""
        self._phase = LINGER
        self.deadline = self.server.now + LINGER_S
        if self.transport is None:
            return
        if self.active is not None or self._queue:  # answers to earlier requests come first
            self._fault = (status, message)
            return
        self.server.flush()
        body = error_body(status, message)
        framing = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(status_line(status) + self.server.date_line + framing + body)
        self.server.refused(status)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Goes on as if the client had not asked for another protocol, which every client must accept."""
        request = self._request
        if request is None:
            self._refuse(400, "Malformed HTTP request.")
            return
        lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.target)]
        lines += [b"%b: %b\r\n" % pair for pair in request.headers if pair[0] not in (b"upgrade", b"connection")]
        self._reset()
        self._phase = AWAIT
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join(lines) + b"\r\n" + rest)
