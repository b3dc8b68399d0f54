"""An engine's reply on its way to the client: which headers go on, what usage it tells, how an error reads."""

from __future__ import annotations

from typing import Any

import msgspec

from weighbridge.http.client_connection import ReplyHead
from weighbridge.http.envelope import error_body

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
    dropped = _STREAM_DROPPED if stream else _DROPPED
    named = head.header(b"connection")
    if named is not None and named.lower() not in (b"close", b"keep-alive"):
        dropped = dropped | {n.strip().lower() for n in named.split(b",")}
    lines = [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] not in dropped]
    lines.append(b"x-request-id: %b\r\n" % request_id.encode())
    if stream:
        lines.append(_STREAM_LINES)
    return b"".join(lines)


def assembled_lines(head: ReplyHead, request_id: str) -> bytes:
    """Header lines for a whole reply that was put together from a stream."""
    dropped = _STREAM_DROPPED | {b"content-type"}
    lines = [b"%b: %b\r\n" % pair for pair in head.headers if pair[0] not in dropped]
    return b"".join((*lines, b"content-type: application/json\r\nx-request-id: %b\r\n" % request_id.encode()))


class Usage(msgspec.Struct, frozen=True):
    """What an engine counted; None where it does not tell."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_decode_body = msgspec.json.Decoder(_Body).decode


def usage_of(value: Any) -> Usage:
    """A usage object, in OpenAI's or Anthropic's spelling; anything odd counts as not told."""
    try:
        return _usage(msgspec.convert(value, _Usage | None))
    except msgspec.ValidationError:
        return Usage()


def usage_of_body(body: bytes) -> Usage:
    """The usage object of a whole reply."""
    try:
        return _usage(_decode_body(body).usage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return Usage()


def _usage(usage: _Usage | None) -> Usage:
    if usage is None:
        return Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    output = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    return Usage(_count(prompt), _count(output), _count(details.cached_tokens) if details else None)


def _count(value: int | None) -> int | None:
    return value if value is not None and value >= 0 else None


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
