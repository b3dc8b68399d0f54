"""An engine's reply on its way to the client: which headers go on, what usage it tells, how an error reads."""

from __future__ import annotations

import msgspec

from weighbridge.http.envelope import error_body
from weighbridge.http.reply_head import ReplyHead

# Framing and hop-by-hop headers are never copied; ours replace the rest of these.
_DROPPED = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"transfer-encoding"),
        *(b"content-length", b"proxy-authenticate", b"proxy-authorization", b"date", b"server", b"x-request-id"),
        *(b"set-cookie", b"alt-svc", b"strict-transport-security", b"access-control-allow-origin"),
    }
)
_STREAM_DROPPED = _DROPPED | {b"cache-control", b"x-accel-buffering", b"content-encoding"}
_STREAM_LINES = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"

# The request is at fault, not the engine: passed on, never retried, no mark against the engine.
FORWARDED_ERRORS = frozenset({400, 402, 403, 404, 405, 406, 409, 410, 411, 413, 414, 415, 416, 417, 422, 424, 431, 451})


def reply_lines(head: ReplyHead, request_id: str, *, stream: bool = False) -> bytes:
    """Header lines for the client."""
    lines = head.notes.get(stream)
    if lines is None:
        lines = head.notes[stream] = _kept_lines(head, stream)
    return b"".join((lines, b"x-request-id: ", request_id.encode(), b"\r\n"))


def _kept_lines(head: ReplyHead, stream: bool) -> bytes:
    """The engine's own lines that go on to the client, and those of every stream."""
    dropped = _STREAM_DROPPED if stream else _DROPPED
    named = head.header(b"connection")
    if named is not None and named.lower() not in (b"close", b"keep-alive"):
        dropped = dropped | {n.strip().lower() for n in named.split(b",")}
    lines = [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] not in dropped]
    return b"".join(lines) + (_STREAM_LINES if stream else b"")


def assembled_lines(head: ReplyHead, request_id: str) -> bytes:
    """Header lines for a whole reply that was put together from a stream."""
    dropped = _STREAM_DROPPED | {b"content-type"}
    lines = [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] not in dropped]
    return b"".join((*lines, b"content-type: application/json\r\nx-request-id: %b\r\n" % request_id.encode()))


def error_frame(unfinished: bool) -> bytes:
    """What a client of a dying stream receives; first ends an event that was cut off."""
    body = error_body(502, "The engine stopped in the middle of this reply.", code="upstream_error")
    return (b"\n\n" if unfinished else b"") + b"data: " + body + b"\n\n"


def client_error(head: ReplyHead, body: bytes, request_id: str) -> tuple[int, bytes, bytes]:
    """(status, lines, body) of an engine's refusal: its own envelope if it has one, else its words in ours."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = None
    error = value.get("error") if isinstance(value, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return head.status, reply_lines(head, request_id), body
    message = "The engine refused the request."
    if isinstance(error, str):
        message = error
    elif isinstance(value, dict) and isinstance(value.get("detail"), str):
        message = value["detail"]
    elif isinstance(value, dict) and isinstance(value.get("message"), str):
        message = value["message"]
    lines = b"content-type: application/json\r\nx-request-id: %b\r\n" % request_id.encode()
    return head.status, lines, error_body(head.status, message)
