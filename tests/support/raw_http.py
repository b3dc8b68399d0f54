"""A small server and raw sockets that talk to it."""

import asyncio

from tests.support.loop import run
from weighbridge.http import HttpServer, Request, Responder, Routes, ServerLimits

HEAD = b"POST /echo HTTP/1.1\r\nhost: a\r\n"


def routes(seen: list[Request] | None = None) -> Routes:
    table = Routes()

    def echo(request: Request, responder: Responder) -> None:
        if seen is not None:
            seen.append(request)
        responder.send(200, request.body, content_type="text/plain")

    table.post("/echo", echo)
    table.get("/ok", lambda request, responder: responder.send(200, b"ok", content_type="text/plain"))
    return table


async def talk(server: HttpServer, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Sends the parts, reads until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(pause_s)
    data = b""
    try:
        async with asyncio.timeout(5):
            data = await reader.read(-1)
    except ConnectionError:
        pass
    writer.close()
    return data


def exchange(*parts: bytes, limits: ServerLimits | None = None, pause_s: float = 0.0) -> bytes:
    async def main() -> bytes:
        server = HttpServer(routes(), limits)
        await server.start()
        try:
            return await talk(server, *parts, pause_s=pause_s)
        finally:
            await server.stop()

    return run(main())


CLOSE = b"connection: close\r\n"
