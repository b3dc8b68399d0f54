"""One request as the server received it: parsed head, whole body, nothing decoded."""

from typing import Any
from urllib.parse import unquote


class Request:
    """A received request. Header names are lower case; `target` is what the request line said."""

    __slots__ = (
        "_index",
        "body",
        "context",
        "headers",
        "keep_alive",
        "method",
        "path",
        "peer",
        "query",
        "received_s",
        "target",
        "version",
    )

    def __init__(
        self,
        method: str,
        target: bytes,
        headers: list[tuple[bytes, bytes]],
        *,
        version: str = "1.1",
        keep_alive: bool = True,
        peer: str = "",
        received_s: float = 0.0,
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.version = version
        self.keep_alive = keep_alive
        self.peer = peer
        self.received_s = received_s
        self.body = b""
        self._index: dict[bytes, bytes] | None = None
        self.context: Any = None  # what `admit` learned about the caller
        path, _, query = target.partition(b"?")
        self.path = path.decode("latin-1")
        self.query = query.decode("latin-1")

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (lower-case name), or None."""
        index = self._index
        if index is None:
            index = self._index = dict(reversed(self.headers))
        return index.get(name)

    def param(self, name: str) -> str | None:
        """The first value of a query parameter, percent-decoded, or None."""
        for part in self.query.split("&"):
            key, _, value = part.partition("=")
            if key == name:
                return unquote(value.replace("+", " "))
        return None

    def __repr__(self) -> str:
        return f"<Request {self.method} {self.path} {len(self.body)} bytes>"
