"""A scriptable server on loopback: writes exactly the bytes it is told to, and records what it saw.

A script is an async function `(call: Call) -> None` that runs once per received request.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable

Script = Callable[["Call"], Awaitable[None]]


class Call:
    """One received request, and the means to answer it byte by byte."""

    def __init__(self, head: bytes, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = head
        self.body = body
        self.peer_closed_s: float | None = None
        self.keep_alive = True
        self.dead = False
        self._reader = reader
        self._writer = writer
        self.peer = writer.get_extra_info("peername")
        """Who asked: the same for all requests of one connection."""

    @property
    def request_line(self) -> str:
        return self.head.split(b"\r\n", 1)[0].decode()

    @property
    def path(self) -> str:
        return self.request_line.split(" ")[1]

    @property
    def headers(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {n.strip().lower(): v.strip() for n, _, v in (line.partition(":") for line in lines if line)}

    async def write(self, data: bytes) -> None:
        """Writes one piece as one segment."""
        self._writer.write(data)
        await self._writer.drain()

    async def pieces(self, data: bytes, size: int, pause_s: float = 0.0) -> None:
        """Writes `data` in pieces of `size` bytes, letting the loop run between them."""
        for start in range(0, len(data), size):
            await self.write(data[start : start + size])
            await asyncio.sleep(pause_s)

    async def reply(self, status: int, body: bytes, content_type: str = "application/json", extra: bytes = b"") -> None:
        """A whole response with Content-Length."""
        head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n"
        await self.write(head % (status, content_type.encode(), len(body), extra) + body)

    async def sse_head(self) -> None:
        await self.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )

    async def chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def last_chunk(self) -> None:
        await self.write(b"0\r\n\r\n")

    async def wait_closed(self, timeout_s: float = 5.0) -> float:
        """Returns the monotonic time at which the peer closed."""
        async with asyncio.timeout(timeout_s):
            try:
                while await self._reader.read(65536):
                    pass
            except ConnectionError:
                pass
        self.peer_closed_s = time.monotonic()
        self.keep_alive = False
        return self.peer_closed_s

    def close(self) -> None:
        """Ends the connection with a FIN."""
        self.keep_alive = False
        self._writer.close()

    async def half_close(self) -> None:
        """Ends its own direction only, and reads on for a while."""
        self.keep_alive = False
        self._writer.write_eof()
        try:
            await self.wait_closed(0.2)
        except TimeoutError:
            self.reset()

    def reset(self) -> None:
        """Ends the connection with a RST."""
        self.keep_alive = False
        self._writer.transport.abort()


class FakeUpstream:
    """Use as `async with FakeUpstream(script) as upstream`."""

    def __init__(self, script: Script, port: int = 0, health: int = 200, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.script = script
        self.calls: list[Call] = []
        self.connections = 0
        self.health = health
        self.port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "FakeUpstream":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def peers(self, *paths: str) -> int:
        """Connections by which `paths` were asked for. Unlike `connections` it counts no stranger: a gateway of another
        run may still look for an engine at a port that is this server's now."""
        return len({call.peer for call in self.calls if call.path in paths})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        body = await reader.readexactly(length)
        call = Call(head, body, reader, writer)
        if call.request_line.startswith("GET ") and self.health:  # a probe: scripts see only what clients ask
            await call.reply(self.health if call.path == "/health" else 404, b"")
            return True
        self.calls.append(call)
        await self.script(call)
        return call.keep_alive
