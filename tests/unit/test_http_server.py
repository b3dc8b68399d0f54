"""The server's framing, deadlines, order and back-pressure, over raw sockets."""

import asyncio
import json

import pytest

from tests.support.loop import run, until
from tests.support.raw_http import CLOSE, HEAD, exchange, routes, talk
from weighbridge.http import HttpServer, Request, Responder, Routes, ServerLimits


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
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        ask = HEAD + b"authorization: Bearer yes\r\ncontent-length: 2\r\n"
        writer.write(ask + b"\r\nab" + ask + b"expect: 100-continue\r\n\r\n")
        got = await reader.readuntil(b"Continue\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 200"), "the answer to the first request comes first"
        writer.close()
        large = HEAD + b"authorization: Bearer yes\r\nexpect: 100-continue\r\ncontent-length: 200\r\n\r\n"
        refused = await talk(server, large)
        assert refused.startswith(b"HTTP/1.1 413")
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
