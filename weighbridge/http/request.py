"""One request as the server received it: parsed head, whole body, nothing decoded."""

from typing import Any
from urllib.parse import unquote


class Head:
    """What stands before a body. Header names are lower case; `target` is what the request line said.

    Requests of one connection may share a head, so nobody changes it; `context` is what `admit` learned about the
    caller the last time.
    """

    __slots__ = ("context", "headers", "index", "keep_alive", "method", "path", "peer", "query", "target", "version")

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        version: str = "1.1",
        keep_alive: bool = True,
        peer: str = "",
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.version = version
        self.keep_alive = keep_alive
        self.peer = peer
        self.context: Any = None
        path, _, query = target.partition(b"?")
        self.path = path.decode("latin-1")
        self.query = query.decode("latin-1")
        self.index: dict[bytes, bytes] = dict(reversed(headers))
        """The first value of each header."""

    def with_length(self, digits: bytes) -> "Head":
        """The same head with another Content-Length."""
        name = b"content-length"
        headers = [(key, digits if key == name else value) for key, value in self.headers]
        head = Head(self.method, self.target, headers, version=self.version, keep_alive=self.keep_alive, peer=self.peer)
        head.context = self.context
        return head


class Request:
    """A received request: its head, and its whole body as it came."""

    __slots__ = ("body", "context", "head", "headers", "keep_alive", "method", "path", "received_s", "version")

    def __init__(self, head: Head, received_s: float) -> None:
        self.head = head
        self.method = head.method
        self.path = head.path
        self.headers = head.headers
        self.version = head.version
        self.keep_alive = head.keep_alive
        self.received_s = received_s
        self.body = b""
        self.context: Any = head.context  # what `admit` learned about the caller

    @property
    def target(self) -> bytes:
        """What the request line said: path and query."""
        return self.head.target

    @property
    def query(self) -> str:
        """What stands behind the question mark."""
        return self.head.query

    @property
    def peer(self) -> str:
        """The client's address, empty where there is none."""
        return self.head.peer

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (lower-case name), or None."""
        return self.head.index.get(name)

    def param(self, name: str) -> str | None:
        """The first value of a query parameter, percent-decoded, or None."""
        for part in self.query.split("&"):
            key, _, value = part.partition("=")
            if key == name:
                return unquote(value.replace("+", " "))
        return None

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path} {len(self.body)} bytes>"
