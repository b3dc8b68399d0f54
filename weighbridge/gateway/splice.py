"""Edits of a JSON object's bytes at its top level: every byte that is not part of an edit stays as it was.

The body has been checked to be valid JSON before; these functions only find where its parts stand.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection

import msgspec

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]:,]', re.DOTALL)
_BLANK = b" \t\r\n"
_KEY = re.compile(rb'[ \t\r\n]*("[^"\\]*(?:\\.[^"\\]*)*")[ \t\r\n]*:[ \t\r\n]*', re.DOTALL)
_AFTER = re.compile(rb"[ \t\r\n]*([,}])")
_values = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
LARGE_BYTES = 64 * 1024
"""Above this a body with a repeated top-level key is refused: finding its parts would hold up everybody else."""


def top_level(body: bytes) -> list[tuple[str, int, int]]:
    """(key, start, end) of each top-level value, in order, repeated keys included.

    Raises ValueError if `body` is not a JSON object.
    """
    found = walk(body)
    return scan(body) if found is None else found


def walk(body: bytes) -> list[tuple[str, int, int]] | None:
    """`top_level` at C speed: the decoder tells how long each value is. None where it cannot, as with repeated keys."""
    try:
        values = _values(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found: list[tuple[str, int, int]] = []
    position = body.index(b"{") + 1
    last = b","
    for key, raw in values.items():
        name = _KEY.match(body, position)
        value = bytes(raw)
        if name is None or msgspec.json.decode(name[1], type=str) != key:
            return None
        start = name.end()
        end = start + len(value)
        after = _AFTER.match(body, end)
        if after is None or not body.startswith(value, start):
            return None
        found.append((key, start, end))
        position, last = after.end(), after[1]
    return found if last == b"}" or not found else None


def scan(body: bytes) -> list[tuple[str, int, int]]:
    """`top_level` token by token: takes any object, at some hundred thousand tokens a second."""
    found: list[tuple[str, int, int]] = []
    depth = 0
    key: str | None = None
    last = b""
    start = 0
    for match in _TOKEN.finditer(body):
        token = match.group()
        first = token[:1]
        if first == b'"':
            last = token
        elif first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth == 0 and key is not None:
                found.append((key, *_trim(body, start, match.start())))
                key = None
        elif depth == 1 and first == b":" and key is None:
            key = msgspec.json.decode(last, type=str)
            start = match.end()
        elif depth == 1 and first == b"," and key is not None:
            found.append((key, *_trim(body, start, match.start())))
            key = None
    if depth != 0 or not body.lstrip(_BLANK).startswith(b"{"):
        raise ValueError("not a JSON object")
    return found


def _trim(body: bytes, start: int, end: int) -> tuple[int, int]:
    while start < end and body[start] in _BLANK:
        start += 1
    while end > start and body[end - 1] in _BLANK:
        end -= 1
    return start, end


def replace_value(body: bytes, key: str, value: bytes) -> bytes:
    """`body` with the value of every top-level `key` replaced, or with the key added if it is absent."""
    spans = [(start, end) for name, start, end in top_level(body) if name == key]
    if not spans:
        return add_value(body, key, value)
    pieces = []
    position = 0
    for start, end in spans:
        pieces += [body[position:start], value]
        position = end
    pieces.append(body[position:])
    return b"".join(pieces)


def add_value(body: bytes, key: str, value: bytes) -> bytes:
    """`body` with a new first key. The caller knows that `key` is absent."""
    brace = body.index(b"{") + 1
    empty = not body.startswith(b'"', brace) and body[brace:].lstrip(_BLANK).startswith(b"}")
    return b"".join((body[:brace], _quoted(key), b":", value, b"" if empty else b",", body[brace:]))


def remove_value(body: bytes, key: str) -> bytes:
    """`body` without any top-level `key`, and without the comma that went with it."""
    while True:
        spans = top_level(body)
        index = next((i for i, span in enumerate(spans) if span[0] == key), None)
        if index is None:
            return body
        _, start, end = spans[index]
        left = _key_start(body, start)
        if index + 1 < len(spans):
            right = body.index(b",", end) + 1
        else:
            right = end
            if index > 0:
                left = body.rindex(b",", 0, left)
        body = body[:left] + body[right:]


def _key_start(body: bytes, value_start: int) -> int:
    """Where the key of the value at `value_start` begins."""
    colon = body.rindex(b":", 0, value_start)
    closing = body.rindex(b'"', 0, colon)
    start = closing
    while True:
        start = body.rindex(b'"', 0, start)
        slashes = start - len(body[:start].rstrip(b"\\"))
        if slashes % 2 == 0:
            return start


@functools.cache
def _quoted(key: str) -> bytes:
    return msgspec.json.encode(key)


def repeated_keys(body: bytes, keys: Collection[str]) -> str | None:
    """A top-level key of `keys` that stands more than once, or None. Fast where no spelling of one repeats.

    Of a large body any repeated key counts.
    """
    if len(body) > LARGE_BYTES:
        found = walk(body)
        return None if found is not None else _first_repeated(body)
    if b"\\u00" not in body:
        count = body.count
        for key in keys:
            if count(_quoted(key)) > 1:
                break
        else:
            return None
    seen = set()
    for name, _, _ in top_level(body):
        if name in keys and name in seen:
            return name
        seen.add(name)
    return None


def _first_repeated(body: bytes) -> str:
    """A guess at the repeated key of a body that cannot be walked."""
    try:
        return next((name for name in _values(body) if body.count(_quoted(name)) > 1), "?")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "?"
