"""The convenient client on top of `Pool`: whole replies, or a stream to iterate."""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec

from weighbridge.http.client_connection import Exchange
from weighbridge.http.errors import BadReply, ExchangeFailed, ReplyTimeout
from weighbridge.http.limits import ClientLimits
from weighbridge.http.pool import Pool
from weighbridge.http.reply_head import ReplyHead
from weighbridge.http.responder import header_lines

MAX_REPLY_BYTES = 256 * 1024 * 1024


class Reply(msgspec.Struct, frozen=True):
    """A whole reply."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (lower-case name), or None."""
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> Any:
        """The body decoded as JSON. Raises msgspec.DecodeError."""
        return msgspec.json.decode(self.body)


class StreamReply:
    """A reply whose body is read by iterating; reading slowly pauses the server through TCP."""

    def __init__(self, limit_bytes: int) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.exchange: Exchange | None = None
        self._limit_bytes = limit_bytes
        self._pieces: list[bytes] = []
        self._buffered = 0
        self._ended = False
        self._error: ExchangeFailed | None = None
        self._wake = asyncio.Event()

    def header(self, name: bytes) -> bytes | None:
        """The first value of a header (lower-case name), or None."""
        return next((value for key, value in self.headers if key == name), None)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._pieces:
                data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
                self._pieces.clear()
                self._buffered = 0
                if self.exchange is not None:
                    self.exchange.resume()
                yield data
            elif self._error is not None:
                raise self._error.again()
            elif self._ended:
                return
            else:
                self._wake.clear()
                await self._wake.wait()

    async def read(self) -> bytes:
        """The rest of the body."""
        return b"".join([data async for data in self])

    async def wait_head(self) -> None:
        """Returns once status and headers are known; raises ExchangeFailed."""
        while not self.status:
            if self._error is not None:
                raise self._error.again()
            self._wake.clear()
            await self._wake.wait()

    # sink

    def on_head(self, head: ReplyHead) -> None:
        """The head has arrived."""
        self.status, self.headers = head.status, head.headers
        self._wake.set()

    def on_data(self, data: bytes) -> None:
        """Body bytes have arrived."""
        self._pieces.append(data)
        self._buffered += len(data)
        if self._buffered > self._limit_bytes and self.exchange is not None:
            self.exchange.pause()
        self._wake.set()

    def on_end(self) -> None:
        """The reply is complete."""
        self._ended = True
        self._wake.set()

    def on_fail(self, error: ExchangeFailed) -> None:
        """The reply will not be completed."""
        self._error = error
        self._wake.set()


class HttpClient:
    """Requests to any origin, each with its own pool. No redirects, no proxies, no environment variables."""

    def __init__(self, limits: ClientLimits | None = None, ssl_context: ssl.SSLContext | None = None) -> None:
        self.limits = limits or ClientLimits()
        self._ssl = ssl_context
        self._pools: dict[tuple[str, str, int], Pool] = {}

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: bytes = b"",
        headers: Iterable[tuple[str, str]] = (),
        timeout_s: float = 60.0,
    ) -> Reply:
        """One whole reply. Raises ExchangeFailed (ReplyTimeout after `timeout_s`)."""
        try:
            async with asyncio.timeout(timeout_s), self.stream(method, url, body=body, headers=headers) as stream:
                pieces, size = [], 0
                async for data in stream:
                    pieces.append(data)
                    size += len(data)
                    if size > MAX_REPLY_BYTES:
                        raise BadReply("the reply is too large", reply_begun=True)
                return Reply(stream.status, stream.headers, b"".join(pieces))
        except TimeoutError:
            raise ReplyTimeout(f"no complete reply within {timeout_s:g} s") from None

    @asynccontextmanager
    async def stream(
        self, method: str, url: str, *, body: bytes = b"", headers: Iterable[tuple[str, str]] = ()
    ) -> AsyncIterator[StreamReply]:
        """A reply whose head has arrived; leaving the block early closes its connection."""
        pool, target, host = self._pool(url)
        stream = StreamReply(self.limits.read_buffer_bytes)
        payload = request_bytes(method, target, host, headers, body)
        stream.exchange = pool.send(payload, stream)
        try:
            await stream.wait_head()
            yield stream
        finally:
            # each refers to the other: cut, so that the last reference frees both without the collector
            exchange, stream.exchange = stream.exchange, None
            exchange.cancel()

    async def close(self) -> None:
        """Closes every connection."""
        pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            await pool.close()

    def _pool(self, url: str) -> tuple[Pool, str, str]:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {url!r}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        key = (parts.scheme, parts.hostname, port)
        pool = self._pools.get(key)
        if pool is None:
            context = None
            if parts.scheme == "https":
                context = self._ssl or ssl.create_default_context()
            pool = self._pools[key] = Pool(parts.hostname, port, self.limits, context)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return pool, target, parts.netloc.rpartition("@")[2]


def request_bytes(method: str, target: str, host: str, headers: Iterable[tuple[str, str]], body: bytes) -> bytes:
    """A whole request. `Content-Length` is set whenever there is a body or the method usually has one."""
    if not target.isascii() or any(c <= " " for c in target):
        raise ValueError(f"not a request target: {target!r}")
    lines = header_lines([("host", host), *headers])
    if body or method in ("POST", "PUT", "PATCH"):
        lines += b"content-length: %d\r\n" % len(body)
    return b"".join((f"{method} {target} HTTP/1.1\r\n".encode(), lines, b"\r\n", body))
