"""One function per target: takes any bytes, raises if an invariant breaks.

The first byte says how often the rest is cut, the next ones where: what a parser reads must not depend on the cuts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec

from weighbridge.core.errors import RequestError
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.settings import RequestLimits
from weighbridge.gateway.splice import add_value, remove_value, replace_value, top_level
from weighbridge.http import ClientLimits, HttpServer, Request, Responder, SseParser, SseScanner
from weighbridge.http.client_connection import ClientConnection, Exchange
from weighbridge.http.connection import ServerConnection

BLANKS = " \t\n\x0b\x0c"


def pieces(data: bytes) -> tuple[bytes, list[bytes]]:
    """The payload, whole and cut as the leading bytes say."""
    count = data[0] % 8 if data else 0
    where, payload = data[1 : 1 + count], data[1 + count :]
    edges = sorted({0, len(payload), *(w * (len(payload) + 1) // 256 for w in where)})
    return payload, [payload[a:b] for a, b in pairwise(edges)]


def standard(stream: bytes) -> list[tuple[str, str]]:
    """(event, data) of each dispatched event, read as the WHATWG standard says."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events, data, kind = [], [], ""
    for line in text.split("\n")[:-1]:
        if line == "":
            if data:
                events.append((kind or "message", "\n".join(data)))
            data, kind = [], ""
        elif not line.startswith(":"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                data.append(value)
            elif field == "event":
                kind = value
    return events


def sse(data: bytes) -> None:
    """The parser equals the standard over any cut."""
    payload, cuts = pieces(data)
    parser = SseParser()
    seen = [(e.event, e.data) for piece in cuts for e in parser.feed(piece)]
    assert seen == standard(payload), (seen, standard(payload))


def scanner(data: bytes) -> None:
    """The relay's scanner passes bytes on, counts like the standard, and strips whole usage-only events at most."""
    payload, cuts = pieces(data)
    plain = SseScanner()
    assert b"".join(plain.feed(piece) for piece in cuts) == payload
    events = [d for _, d in standard(payload)]
    assert plain.done or not any(d.strip(BLANKS) == "[DONE]" for d in events)
    whole = SseScanner()
    whole.feed(payload)
    assert _state(plain) == _state(whole), (_state(plain), _state(whole))
    strip = SseScanner(strip_usage=True)
    out = b"".join(strip.feed(piece) for piece in cuts) + strip.flush()
    try:
        payload.decode()
    except UnicodeDecodeError:  # then a frame may look like usage to a reader that replaces bytes, and passes
        return
    kept, left = standard(out), [e for e in standard(payload) if not _usage_only(e[1])]
    assert kept == left, (kept, left)
    typed = SseScanner(typed=True)
    assert b"".join(typed.feed(piece) for piece in cuts) == payload


def splice(data: bytes) -> None:
    """Edits of a valid object mean the edit and nothing else; anything else is refused with 400."""
    parsed = None
    for endpoint in ("completions", "embeddings", "responses", "tokenize", "chat"):
        try:
            parsed = ClientRequest(endpoint, data, RequestLimits())
        except RequestError as error:
            assert error.status == 400
            parsed = None
    if parsed is None:
        return
    assert parsed.body == data
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # the reader is laxer in fields that it does not decode
        return
    spans = top_level(data)
    assert {k: json.loads(data[a:b]) for k, a, b in spans} == value
    for key in ("model", "stream_options", "priority", *list(value)[:2]):
        replaced = replace_value(data, key, b'{"x":1}')
        assert json.loads(replaced) == {**value, key: {"x": 1}}
        removed = remove_value(data, key)
        assert json.loads(removed) == {k: v for k, v in value.items() if k != key}
        if key not in value:
            assert json.loads(add_value(data, key, b"5")) == {**value, key: 5}


def head(data: bytes) -> None:
    """The server hands over the same requests over any cut, answers everything else itself, and never raises."""
    payload, cuts = pieces(data)
    whole, cut = _serve([payload]), _serve(cuts)
    assert whole == cut, (whole, cut)


def reply(data: bytes) -> None:
    """The client reads the same reply over any cut and ends every exchange exactly once."""
    payload, cuts = pieces(data)
    whole, cut = _receive([payload]), _receive(cuts)
    assert whole == cut, (whole, cut)


def _state(scan: SseScanner) -> tuple[Any, ...]:
    return scan.done, scan.events, scan.usage, scan.error, bool(scan.finish), scan.tokens_seen


def _usage_only(data: str) -> bool:
    if data.strip(BLANKS) == "[DONE]":
        return False
    try:
        frame = msgspec.json.decode(data.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeError):
        return False
    if not isinstance(frame, dict) or frame.get("error"):
        return False
    return isinstance(frame.get("usage"), dict) and frame.get("choices") == []


class _Transport:
    """Takes bytes; a loop is not needed."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.written += data

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def get_write_buffer_size(self) -> int:
        return 0

    def _nothing(self, *args: Any, **named: Any) -> None:
        pass

    abort = close
    write_eof = set_write_buffer_limits = pause_reading = resume_reading = _nothing


def _serve(cuts: list[bytes]) -> tuple[list[Any], list[bytes]]:
    seen: list[Any] = []

    def handler(request: Request, responder: Responder) -> None:
        seen.append((request.method, request.target, request.headers, request.body, request.keep_alive))
        assert b"\r" not in request.target
        assert not any(c in v for _, v in request.headers for c in b"\r\n\0"), "no line can be injected"
        assert sum(n == b"host" for n, _ in request.headers) <= 1
        responder.send(200, b"ok")

    server = HttpServer(handler)
    connection = ServerConnection(server)
    transport = _Transport()
    connection.connection_made(transport)
    for piece in cuts:
        if transport.closed:
            break
        connection.data_received(piece)
    lines = [line for line in transport.written.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    # of several faults in one request the first one seen is named, and that depends on the cuts
    statuses = [line[9:12] if line[9:10] in b"12" else b"refused" for line in lines]
    connection.connection_lost(None)
    assert server.buffered_bytes == 0
    assert not server.connections
    return seen, statuses


class _Pool:
    def __init__(self) -> None:
        self.limits = ClientLimits()
        self.read_s = self.limits.read_s
        self.connections: set[Any] = set()
        self.known_reply: Any = None
        self.loop_pass = self
        self.now = 0.0
        self.closed = False
        self.clock: Callable[[], float] = lambda: 0.0

    def _nothing(self, *args: Any) -> None:
        pass

    give_back = dial = write = _nothing

    def gone(self, connection: Any) -> None:
        self.connections.discard(connection)


class _Sink:
    def __init__(self) -> None:
        self.head: Any = None
        self.body = b""
        self.ends: list[str] = []

    def on_head(self, head: Any) -> None:
        assert self.head is None
        assert not self.ends
        assert not any(c in v for _, v in head.headers for c in b"\r\n\0"), "no line can be injected"
        self.head = (head.status, head.headers)

    def on_data(self, data: bytes) -> None:
        assert self.head is not None
        assert not self.ends
        self.body += data

    def on_end(self) -> None:
        self.ends.append("end")

    def on_fail(self, error: Any) -> None:
        self.ends.append(type(error).__name__)


def _receive(cuts: list[bytes]) -> tuple[Any, bytes, list[str]]:
    pool, sink = _Pool(), _Sink()
    connection = ClientConnection(pool)
    transport = _Transport()
    connection.connection_made(transport)
    exchange = Exchange(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", sink)
    exchange.resent = True  # a reply that never began is a failure here, not a reason to dial again
    connection.begin(exchange)
    for piece in cuts:
        if transport.closed or sink.ends:
            break
        connection.data_received(piece)
    with contextlib.suppress(NotImplementedError):  # a protocol may leave half-closing out
        connection.eof_received()
    connection.connection_lost(None)
    assert len(sink.ends) == 1, sink.ends
    body = sink.body if sink.ends == ["end"] else b""  # how much of a broken body was seen depends on the cuts
    return sink.head, body, sink.ends


TARGETS: dict[str, Callable[[bytes], None]] = {
    "sse": sse,
    "scanner": scanner,
    "splice": splice,
    "head": head,
    "reply": reply,
}
