"""The server over time, over raw sockets: deadlines, disconnects, back-pressure, crashes, old clients, draining."""

import asyncio
import json
import time

import pytest

from tests.support.loop import run, until
from tests.support.raw_http import HEAD, routes, talk
from weighbridge.http import HttpServer, Request, Responder, Routes, ServerLimits


def test_slow_heads_and_bodies_get_408_and_others_are_served() -> None:
    async def main() -> None:
        server = HttpServer(routes(), ServerLimits(head_s=0.3, body_s=0.4, idle_s=0.3))
        await server.start()

        async def drip(data: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            reading = asyncio.create_task(reader.read(-1))
            for i in range(len(data)):
                if reading.done():
                    break
                try:
                    writer.write(data[i : i + 1])
                    await writer.drain()
                except ConnectionError:
                    break
                await asyncio.sleep(0.02)
            writer.close()
            return await reading

        head = b"GET /ok HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200
        body = b"z" * 200
        started = time.monotonic()
        slow_head = asyncio.create_task(drip(head))

        async def slow() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(HEAD + b"content-length: 1000\r\n\r\n" + body)
            data = await reader.read(-1)
            writer.close()
            return data

        slow_body = asyncio.create_task(slow())
        ok = await talk(server, b"GET /ok HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert ok.endswith(b"ok")
        assert (await slow_head).startswith(b"HTTP/1.1 408")
        assert (await slow_body).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - started < 4.0
        assert await talk(server) == b"", "a silent connection is closed without a word"
        await server.stop()

    run(main())


def test_disconnect_reaches_the_handler() -> None:
    async def main() -> None:
        gone: list[str] = []

        async def task(request: Request, responder: Responder) -> None:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                gone.append("task")
                raise

        def callback(request: Request, responder: Responder) -> None:
            responder.on_disconnect = lambda: gone.append("callback")

        table = Routes()
        table.get("/task", task)
        table.get("/callback", callback)
        server = HttpServer(table)
        await server.start()
        for path in ("task", "callback"):
            for how in ("close", "abort", "half"):
                gone.clear()
                _, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(f"GET /{path} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
                await until(lambda: server.active == 1)
                if how == "close":
                    writer.close()
                elif how == "abort":
                    writer.transport.abort()
                else:
                    writer.write_eof()
                await until(lambda path=path: gone == [path], 1.0)
                writer.close()
        await server.stop()

    run(main())


def test_a_reader_that_stops_pauses_the_source_and_is_cut() -> None:
    async def main() -> None:
        sent = 0
        paused: list[float] = []

        async def flood(request: Request, responder: Responder) -> None:
            nonlocal sent
            responder.on_pause = lambda: paused.append(time.monotonic())
            responder.start(200)
            for _ in range(3200):
                responder.write(b"x" * 65536)
                sent += 65536
                await responder.drain()
            responder.end()

        table = Routes()
        table.get("/flood", flood)
        server = HttpServer(table, ServerLimits(write_s=0.5))
        await server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.transport.pause_reading()
        writer.write(b"GET /flood HTTP/1.1\r\nhost: a\r\n\r\n")
        await until(lambda: bool(paused))
        stopped_at = sent
        assert stopped_at < 20_000_000, "bounded by the socket buffers and one window"
        await until(lambda: not server.connections, 5.0)
        assert sent - stopped_at <= 65536
        writer.close()
        await server.stop()

    run(main())


def test_errors_use_the_envelope_and_crashes_are_500(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        def crash(request: Request, responder: Responder) -> None:
            raise RuntimeError("boom")

        async def late(request: Request, responder: Responder) -> None:
            responder.start(200)
            responder.write(b"x")
            raise RuntimeError("boom")

        table = routes()
        table.get("/crash", crash)
        table.get("/late", late)
        server = HttpServer(table)
        await server.start()
        get = "GET {} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        for path, status, code in (
            ("/nope", 404, "unknown_url"),
            ("/echo", 405, "method_not_allowed"),
            ("/crash", 500, None),
        ):
            reply = await talk(server, get.format(path).encode())
            assert reply.startswith(b"HTTP/1.1 %d" % status)
            error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
            assert error["code"] == code
            assert "boom" not in error["message"]
        cut = await talk(server, get.format("/late").encode())
        assert b"0\r\n\r\n" not in cut, "a response that breaks midway is visibly incomplete"
        await server.stop()

    run(main())
    assert "boom" in caplog.text


def test_http_1_0_gets_unchunked_bodies() -> None:
    async def main() -> None:
        async def stream(request: Request, responder: Responder) -> None:
            responder.start_sse()
            responder.write(b"data: 1\n\n")
            responder.end(b"data: 2\n\n")

        table = Routes()
        table.get("/s", stream)
        server = HttpServer(table)
        await server.start()
        old = await talk(server, b"GET /s HTTP/1.0\r\n\r\n")
        assert b"transfer-encoding" not in old
        assert old.endswith(b"\r\n\r\ndata: 1\n\ndata: 2\n\n")
        new = await talk(server, b"GET /s HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert new.endswith(b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n")
        head = new.partition(b"\r\n\r\n")[0]
        assert b"cache-control: no-cache" in head
        assert b"x-accel-buffering: no" in head
        assert b"content-length" not in head
        await server.stop()

    run(main())


def test_drain_lets_running_requests_end() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def slow(request: Request, responder: Responder) -> None:
            await gate.wait()
            responder.send(200, b"done")

        table = Routes()
        table.get("/slow", slow)
        server = HttpServer(table)
        await server.start()
        running = asyncio.create_task(talk(server, b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n"))
        await until(lambda: server.active == 1)
        draining = asyncio.create_task(server.drain(5.0))
        await asyncio.sleep(0.05)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", server.port)
        assert not draining.done()
        gate.set()
        assert (await running).endswith(b"done")
        assert await draining
        await server.stop()

    run(main())


def test_header_values_cannot_inject_lines() -> None:
    async def main() -> None:
        def bad(request: Request, responder: Responder) -> None:
            responder.send(200, b"", headers=(("x-model", "a\r\nset-cookie: b"),))

        def good(request: Request, responder: Responder) -> None:
            responder.send(200, b"", headers=(("x-model", "模型🙂"),))

        table = Routes()
        table.get("/bad", bad)
        table.get("/good", good)
        server = HttpServer(table)
        await server.start()
        reply = await talk(server, b"GET /bad HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert reply.startswith(b"HTTP/1.1 500")
        assert b"set-cookie" not in reply
        reply = await talk(server, b"GET /good HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert b"x-model: %E6%A8%A1%E5%9E%8B%F0%9F%99%82\r\n" in reply
        await server.stop()

    run(main())
