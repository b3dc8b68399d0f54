"""Heads that come again. A client repeats its head with every request of a connection, and an engine repeats its own
for a second at a time; only the digits of Content-Length change. Such a head need not be parsed again."""

import re

from weighbridge.http.request import Head, Request

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})[ \t]*\r\n", re.IGNORECASE)


class KnownHead:
    """A head that was parsed and accepted before, with a gap where the digits of its Content-Length stand.

    After `find` said yes, `digits` is what fills the gap now (empty in a head without Content-Length), `length` what
    they say (else -1), and `start` is where the body begins.
    """

    __slots__ = ("_after", "_before", "_gap", "_reach", "digits", "length", "start")

    def __init__(self, head: bytes) -> None:
        """`head` reaches from the first byte of the start line to the end of the empty line."""
        found = _LENGTH.search(head)
        self._gap = -1 if found is None else found.start(1)
        self._before = head if found is None else head[: self._gap]
        self._after = b"" if found is None else head[found.end(1) :]
        self._reach = len(self._before)
        self.digits = b"" if found is None else found[1]
        self.length = int(self.digits or -1)
        self.start = len(head)

    def find(self, data: bytes) -> bool:
        """Whether `data` begins with this head, whole, whatever number stands in the gap."""
        # slices are compared quicker than a method that parses its arguments
        if data[: self._reach] != self._before:
            return False
        if self._gap < 0:
            return True
        middle = self._gap + len(self.digits)
        start = middle + len(self._after)
        if data[middle:start] == self._after and data[self._gap : middle] == self.digits:
            self.start = start
            return True
        end = data.find(b"\r\n", self._gap, self._gap + 32)
        if end < 0:
            return False
        digits = data[self._gap : end]
        if not digits.isdigit() or len(digits) > 15 or not data.startswith(self._after, end):
            return False
        self.digits, self.length = digits, int(digits)
        self.start = end + len(self._after)
        return True


class KnownRequest:
    """The head of a connection's last plain request: framed by Content-Length, kept alive, expecting nothing."""

    __slots__ = ("_head", "_known")

    def __init__(self, head: Head, head_bytes: bytes) -> None:
        self._head = head
        self._known = KnownHead(head_bytes)

    def take(self, data: bytes, received_s: float) -> Request | None:
        """The request in `data`, if it is one, whole, and begins with the same head. Else the parser must look."""
        known = self._known
        digits = known.digits
        if not known.find(data) or known.length != len(data) - known.start:
            return None
        if known.digits != digits:
            self._head = self._head.with_length(known.digits)
        request = Request(self._head, received_s)
        request.body = data[known.start :]
        return request


def learn(request: Request, data: bytes) -> KnownRequest | None:
    """What is to be remembered of a request with plain framing; None where `data` holds more than the request."""
    head_bytes = data[: len(data) - len(request.body)]
    alone = head_bytes.startswith(request.method.encode()) and head_bytes.find(b"\r\n\r\n") == len(head_bytes) - 4
    return KnownRequest(request.head, head_bytes) if alone else None
