"""The server's framing, deadlines, order and back-pressure, over raw sockets."""

import asyncio
import json
import time

import pytest

from tests.support.loop import run, until
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


@pytest.mark.parametrize(
    ("name", "wire", "status"),
    [
        ("cl and te", HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("te and cl", HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n", 400),
        ("two lengths", HEAD + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc", 400),
        ("signed length", HEAD + b"content-length: +3\r\n\r\nabc", 400),
        ("length list", HEAD + b"content-length: 3, 3\r\n\r\nabc", 400),
        ("negative length", HEAD + b"content-length: -3\r\n\r\nabc", 400),
        ("folded header", HEAD + b"x: a\r\n b\r\n\r\n", 400),
        ("bare LF", b"GET /ok HTTP/1.1\nhost: a\n\n", 400),
        ("bare CR", b"GET /ok HTTP/1.1\r\nhost: a\rx: y\r\n\r\n", 400),
        ("space before colon", HEAD + b"x : a\r\n\r\n", 400),
        ("NUL in a value", HEAD + b"x: a\0b\r\n\r\n", 400),
        ("gzip, chunked", HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        ("xchunked", HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 400),
        ("two codings", HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("chunked 1.0", b"POST /echo HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("bad chunk size", HEAD + b"transfer-encoding: chunked\r\n\r\n1 \r\nx\r\n0\r\n\r\n", 400),
        ("LF chunk", HEAD + b"transfer-encoding: chunked\r\n\r\n1\nx\n0\n\n", 400),
        ("long chunk", HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n", 400),
        ("huge chunk", HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\nx\r\n0\r\n\r\n", 400),
        ("no host", b"GET /ok HTTP/1.1\r\n\r\n", 400),
        ("two hosts", b"GET /ok HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
        ("HTTP/2.0", b"GET /ok HTTP/2.0\r\nhost: a\r\n\r\n", 505),
        ("CONNECT", b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", 405),
        ("control in target", b"GET /\x01 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
        ("unknown expectation", HEAD + b"expect: soon\r\ncontent-length: 1\r\n\r\nx", 417),
        ("garbage", b"\x16\x03\x01\x02\x00\x01\x00", 400),
    ],
)
def test_bad_framing_is_refused_and_the_connection_closed(name: str, wire: bytes, status: int) -> None:
    smuggled = b"GET /ok HTTP/1.1\r\nhost: a\r\n\r\n"
    reply = exchange(wire + smuggled)
    assert reply.startswith(b"HTTP/1.1 %d " % status), name
    assert reply.count(b"HTTP/1.1 ") == 1, "what follows a malformed request is never answered"
    head, _, body = reply.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert json.loads(body)["error"]["message"]


def test_caps_on_head_headers_and_body() -> None:
    limits = ServerLimits(max_head_bytes=2000, max_headers=20, max_body_bytes=100)
    assert exchange(HEAD + b"x: " + b"a" * 3000, limits=limits).startswith(b"HTTP/1.1 431")
    assert exchange(HEAD + b"x: a\r\n" * 30 + b"\r\n", limits=limits).startswith(b"HTTP/1.1 431")
    assert exchange(HEAD + b"content-length: 101\r\n\r\n", limits=limits).startswith(b"HTTP/1.1 413")
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n" + (b"1e\r\n" + b"a" * 30 + b"\r\n") * 4
    assert exchange(chunked, limits=limits).startswith(b"HTTP/1.1 413")
    fine = exchange(HEAD + CLOSE + b"content-length: 100\r\n\r\n" + b"b" * 100, limits=limits)
    assert fine.endswith(b"\r\n\r\n" + b"b" * 100)


def test_chunked_body_with_extension_and_trailer_is_reassembled() -> None:
    body = "".join(f"1;ext=1\r\n{c}\r\n" for c in "weighbridge").encode() + b"0\r\nx-t: content-length\r\n\r\n"
    reply = exchange(HEAD + CLOSE + b"transfer-encoding: chunked\r\n\r\n" + body)
    assert reply.endswith(b"content-length: 11\r\n" + CLOSE + b"\r\nweighbridge")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_any_cut_of_a_request(size: int) -> None:
    wire = HEAD + CLOSE + b"content-length: 5\r\n\r\nhello"
    reply = exchange(*[wire[i : i + size] for i in range(0, len(wire), size)])
    assert reply.startswith(b"HTTP/1.1 200 OK\r\n")
    assert reply.endswith(b"hello")


def test_pipelined_requests_are_answered_in_order() -> None:
    async def main() -> None:
        gate = asyncio.Event()
        order: list[str] = []

        async def slow(request: Request, responder: Responder) -> None:
            await gate.wait()
            order.append("slow")
            responder.send(200, b"slow")

        def quick(request: Request, responder: Responder) -> None:
            order.append("quick")
            responder.send(200, b"quick")

        table = Routes()
        table.get("/slow", slow)
        table.get("/quick", quick)
        server = HttpServer(table, ServerLimits(max_pipelined=4))
        await server.start()
        wire = b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n" + b"GET /quick HTTP/1.1\r\nhost: a\r\n\r\n" * 50
        wire += b"GET /quick HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        task = asyncio.create_task(talk(server, wire))
        await until(lambda: server.active == 1)
        assert order == []
        gate.set()
        reply = await task
        assert order == ["slow"] + ["quick"] * 51
        assert reply.count(b"HTTP/1.1 200") == 52
        assert reply.index(b"slow") < reply.index(b"quick")
        await server.stop()
        assert server.buffered_bytes == 0

    run(main())


def test_a_bad_request_behind_a_good_one_leaves_the_good_answer() -> None:
    good = HEAD + b"content-length: 2\r\n\r\nhi"
    reply = exchange(good + b"GET /ok HTTP/1.1\nhost: a\n\n")
    first, _, second = reply.partition(b"\r\n\r\nhi")
    assert first.startswith(b"HTTP/1.1 200")
    assert second.startswith(b"HTTP/1.1 400")


def test_continue_is_sent_once_and_only_if_the_body_is_wanted() -> None:
    async def main() -> None:
        def admit(request: Request) -> tuple[int, str] | None:
            return (401, "No.") if request.header(b"authorization") != b"Bearer yes" else None

        server = HttpServer(routes(), ServerLimits(max_body_bytes=100), admit)
        await server.start()
        for spelling in (b"100-continue", b"100-Continue"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            ask = HEAD + b"expect: %b\r\nauthorization: Bearer yes\r\ncontent-length: 2\r\n\r\n" % spelling
            writer.write(ask)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"ab")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            writer.close()
        refused = await talk(server, HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 401")
        assert b"100 Continue" not in refused
        large = HEAD + b"authorization: Bearer yes\r\nexpect: 100-continue\r\ncontent-length: 200\r\n\r\n"
        refused = await talk(server, large)
        assert refused.startswith(b"HTTP/1.1 413")
        await server.stop()

    run(main())


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


def test_upgrade_is_ignored() -> None:
    wire = b"POST /echo HTTP/1.1\r\nhost: a\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    wire += b"content-length: 2\r\n\r\nhi"
    reply = exchange(wire + b"GET /ok HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    assert reply.count(b"HTTP/1.1 200") == 2
    assert b"hi" in reply


@pytest.mark.parametrize("connection", [b"", b"connection: keep-alive\r\n", b"connection: upgrade\r\n"])
def test_an_upgrade_that_no_connection_header_names_is_an_ordinary_request(connection: bytes) -> None:
    wire = b"POST /echo HTTP/1.1\r\nhost: a\r\nupgrade: websocket\r\n" + connection
    for body in (b"content-length: 3\r\n\r\nabc", b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"):
        reply = exchange(wire + body + b"GET /ok HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert reply.count(b"HTTP/1.1 200") == 2
        assert b"\r\n\r\nabcHTTP" in reply
    reply = exchange(b"GET /ok HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: close\r\n\r\n")
    assert b"connection: close" in reply


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
