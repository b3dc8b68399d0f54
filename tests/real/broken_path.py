"""A TCP path to a real server that breaks one request, for faults that no engine makes on demand."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Literal

Where = Literal["sent", "answered"]


class BrokenPath:
    """Passes bytes both ways unchanged. While `armed`, the connection of the next POST is reset: before the server sees
    the request ("sent"), or when its answer begins, before the first byte of it is passed on ("answered").

    `on_post` is called with every POST's first bytes before they are passed on.
    """

    def __init__(self, port: int) -> None:
        self.armed: Where | None = None
        self.broken = 0
        self.posts: list[bytes] = []
        self.on_post: Callable[[], None] = lambda: None
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> BrokenPath:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port)
            with contextlib.closing(to_server):
                await self._pass_on(reader, writer, from_server, to_server)

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        from_server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        breaking = False

        async def answers() -> None:
            while data := await from_server.read(1 << 16):
                if breaking:
                    self.broken += 1
                    _reset(writer)
                    return
                writer.write(data)
                await writer.drain()

        back = asyncio.create_task(answers())
        try:
            while data := await _read(reader, back):
                if data.startswith(b"POST "):
                    self.posts.append(data)
                    self.on_post()
                    where, self.armed = self.armed, None
                    if where == "sent":
                        self.broken += 1
                        _reset(writer)
                        return
                    breaking = where == "answered"
                to_server.write(data)
                await to_server.drain()
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)


async def _read(reader: asyncio.StreamReader, back: asyncio.Task[None]) -> bytes:
    """What the client sends next; nothing once either side is gone."""
    reading = asyncio.create_task(reader.read(1 << 16))
    await asyncio.wait((reading, back), return_when=asyncio.FIRST_COMPLETED)
    if not reading.done():
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        return b""
    return reading.result()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes a connection with RST: whatever was not read is lost."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
