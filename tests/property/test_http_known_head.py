"""A head that came before is taken without parsing: what is seen must be what the parser would have said."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weighbridge.http import Exchange, HttpServer, Pool, ReplyHead, Request, Responder, ServerLimits
from weighbridge.http.client_connection import ClientConnection
from weighbridge.http.connection import ServerConnection
from weighbridge.http.known_head import KnownHead

BODIES = st.sampled_from([b"", b"{}", b"hello", b"0123456789", b"a\r\n\r\nb", b"x" * 101])
REQUEST_LINES = st.sampled_from([b"POST /a HTTP/1.1", b"POST /b?q=1 HTTP/1.1", b"PUT /a HTTP/1.1", b"POST /a HTTP/1.0"])
FIELDS = st.sampled_from(
    [b"Host: h", b"X: 1", b"x:2", b"Connection: close", b"Upgrade: h2c", b"Expect: 100-continue", b"Content-Length : 1"]
)
LENGTHS = st.sampled_from(
    [b"Content-Length: %d", b"content-length:%d ", b"content-length: 0%d", b"Content-Length: %d\r\nX: y"]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request of few kinds, so that heads often repeat; some are refused."""
    body = draw(BODIES)
    lines = [draw(REQUEST_LINES), b"Host: h"]
    lines += [draw(FIELDS) for _ in range(draw(st.integers(0, 1)))]
    lines.append(draw(LENGTHS) % (len(body) + draw(st.sampled_from([0, 0, 0, 0, 1]))))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Transport:
    """Takes what is written; knows whether it was closed."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str) -> Any:
        return None

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def _nothing(self, *args: Any, **named: Any) -> None:
        pass

    abort = write_eof = close
    set_write_buffer_limits = pause_reading = resume_reading = _nothing


def serve(reads: list[bytes]) -> tuple[list[Any], list[bytes]]:
    """What a handler saw, and the status lines of what was written."""
    seen: list[Any] = []

    def handler(request: Request, responder: Responder) -> None:
        header = request.header(b"content-length")
        seen.append((request.method, request.target, request.headers, request.path, request.query, header))
        seen.append((request.body, request.keep_alive, request.version))
        responder.send(200, b"ok")

    server = HttpServer(handler, ServerLimits(max_body_bytes=100))
    connection = ServerConnection(server)
    transport = Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    for data in reads:
        if not transport.closed:
            connection.data_received(data)
    connection.connection_lost(None)
    assert server.buffered_bytes == 0
    return seen, [line[:12] for line in transport.written.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


@given(st.lists(requests(), min_size=3, max_size=8))
def test_a_known_head_is_read_as_the_parser_reads_it(messages: list[bytes]) -> None:
    """One read for each request, against reads that cut every head, of which none is remembered."""
    cut = [piece for message in messages for piece in (message[:5], message[5:])]
    assert serve(messages) == serve(cut)


STATUS_LINES = st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.1 200 Fine", b"HTTP/1.0 200 OK", b"HTTP/1.1 404 No"])
REPLY_FIELDS = st.sampled_from([b"x: 1", b"Date: now", b"connection: close", b"keep-alive: timeout=3", b"bad field"])


@st.composite
def replies(draw: st.DrawFn) -> bytes:
    """A reply of few kinds, so that heads often repeat; some are refused."""
    body = draw(BODIES)
    lines = [draw(STATUS_LINES), *(draw(REPLY_FIELDS) for _ in range(draw(st.integers(0, 1))))]
    lines.append(draw(LENGTHS) % (len(body) + draw(st.sampled_from([0, 0, 0, 0, 1]))))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Sink:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_head(self, head: ReplyHead) -> None:
        self.told.append((head.status, list(head.headers), head.length, head.chunked))

    def on_data(self, data: bytes) -> None:
        self.told.append(data)

    def on_end(self) -> None:
        self.told.append("end")

    def on_fail(self, error: Exception) -> None:
        self.told.append(type(error))


async def fetch(messages: list[list[bytes]]) -> list[Any]:
    """What the sinks of exchanges were told, one after the other on connections of one pool."""
    pool = Pool("127.0.0.1", 1)
    told: list[Any] = []
    for reads in messages:
        connection = ClientConnection(pool)
        connection.connection_made(Transport())  # type: ignore[arg-type]
        sink = Sink()
        connection.begin(Exchange(b"POST / HTTP/1.1\r\n\r\n", sink))
        for data in reads:
            if connection.exchange is not None:
                connection.data_received(data)
        told += [sink.told, pool.idle, connection.idle_limit_s]
    return told


@given(st.lists(replies(), min_size=2, max_size=8))
def test_a_known_reply_is_read_as_the_parser_reads_it(messages: list[bytes]) -> None:
    cut = [[message[:5], message[5:]] for message in messages]
    assert asyncio.run(fetch([[message] for message in messages])) == asyncio.run(fetch(cut))


HEAD = b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %b\r\nX: y\r\n\r\n"


@given(st.binary(max_size=20), st.integers(0, 10**15 - 1))
def test_only_digits_fill_the_gap(filling: bytes, number: int) -> None:
    known = KnownHead(HEAD % b"12")
    plain = filling.isdigit() and len(filling) <= 15
    assert known.find(HEAD % filling) == plain
    digits = b"%d" % number
    assert known.find(HEAD % digits + b"body")
    assert (known.digits, known.length, known.start) == (digits, number, len(HEAD % digits))
    assert not known.find((HEAD % digits)[:-1])
