"""How deep a body's JSON is nested, told at C speed and without building it: engines recurse, and some crash."""

from __future__ import annotations

from itertools import accumulate

from weighbridge.core.errors import RequestError
from weighbridge.gateway.splice import LARGE_BYTES, scan, walk

MAX_CONTAINERS = 100_000
"""Lists and objects in one body; more would take the event loop longer to look at than all the rest."""
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_STEP = [0] * 256
for _byte in b"[{":
    _STEP[_byte] = 1
for _byte in b"]}":
    _STEP[_byte] = -1
del _byte


def check_nesting(body: bytes, most: int) -> None:
    """Refuse a body, which must be valid JSON, that is nested deeper than `most` levels. Only one that has more opening
    brackets and braces than that need be looked at.

    Raises:
        RequestError: 400, naming the field.
    """
    brackets = _brackets(body)
    if len(brackets) > 2 * MAX_CONTAINERS:
        message = f"The body holds more than {MAX_CONTAINERS} lists and objects; split it into several requests."
        raise RequestError(message, code="array_above_max_length")
    if _depth(brackets) > most:
        raise too_deep(body, most)


def too_deep(body: bytes, most: int) -> RequestError:
    """The refusal of a body that is nested deeper than `most` levels, with the field where that can be told."""
    fields = walk(body)
    if fields is None and len(body) <= LARGE_BYTES:
        try:
            fields = scan(body)
        except ValueError:
            fields = None
    deep = (name for name, start, end in fields or () if _depth(_brackets(body[start:end])) >= most)
    field = next(deep, None)
    where = f"`{field}`" if field else "The body"
    message = f"{where} is nested deeper than the {most} levels that are allowed; flatten it."
    return RequestError(message, param=field, code="nesting_too_deep")


def _brackets(text: bytes) -> bytes:
    """The brackets and braces of valid JSON, those in strings left out."""
    if b"\\" in text:  # a backslash stands in strings alone: what it escapes ends none
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    return b"".join(text.split(b'"')[::2]).translate(None, _NO_BRACKETS)


def _depth(brackets: bytes) -> int:
    return max(accumulate(map(_STEP.__getitem__, brackets)), default=0)
