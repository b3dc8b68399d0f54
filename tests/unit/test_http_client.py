"""The pooled client against a server that writes chosen bytes at chosen cuts."""

import asyncio

import pytest

from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.http import (
    BadReply,
    ClientLimits,
    ConnectFailed,
    ConnectionCut,
    HttpClient,
    HttpServer,
    Pool,
    ReplyTimeout,
    Request,
    Responder,
)
from weighbridge.http.client_connection import ClientConnection
from weighbridge.http.connection import ServerConnection


def ask(
    reply: bytes, size: int = 1 << 20, *, close: bool = False, limits: ClientLimits | None = None
) -> tuple[int, bytes]:
    async def script(call: Call) -> None:
        await call.pieces(reply, size)
        if close:
            call.close()

    async def main() -> tuple[int, bytes]:
        async with FakeUpstream(script, health=0) as upstream:
            client = HttpClient(limits)
            try:
                got = await client.request("POST", upstream.url + "/x", body=b"{}", timeout_s=5.0)
                return got.status, got.body
            finally:
                await client.close()

    return run(main())


LENGTH = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;a=b\r\nhe\r\n3\r\nllo\r\n0\r\nx: y\r\n\r\n"
UNTIL_EOF = b"HTTP/1.1 200 OK\r\n\r\nhello"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + LENGTH


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(("wire", "close"), [(LENGTH, False), (CHUNKED, False), (UNTIL_EOF, True), (INTERIM, False)])
def test_every_framing_over_any_cut(wire: bytes, close: bool, size: int) -> None:
    assert ask(wire, size, close=close) == (200, b"hello")


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n+2\r\nhe\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0x2\r\nhe\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1_0\r\nhe\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhel\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000,
    ],
)
def test_malformed_replies_are_refused(wire: bytes) -> None:
    with pytest.raises(BadReply):
        ask(wire)


def test_truncated_replies_are_errors() -> None:
    for wire in (LENGTH[:-1], CHUNKED[:-3], b"HTTP/1.1 200 OK\r\ncontent-le"):
        with pytest.raises(ConnectionCut) as caught:
            ask(wire, close=True)
        assert caught.value.reply_begun
    with pytest.raises(ConnectionCut) as caught:
        ask(b"", close=True)
    assert not caught.value.reply_begun


def test_deadlines() -> None:
    async def main() -> None:
        async def silent(call: Call) -> None:
            if call.path == "/mid":
                await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe")
            await call.wait_closed()

        async with FakeUpstream(silent, health=0) as upstream:
            client = HttpClient(ClientLimits(head_s=0.2, read_s=0.2))
            for path, begun in (("/none", False), ("/mid", True)):
                with pytest.raises(ReplyTimeout) as caught:
                    await client.request("GET", upstream.url + path)
                assert caught.value.reply_begun == begun
                await until(lambda: upstream.calls[-1].peer_closed_s is not None)
            await client.close()
            client = HttpClient()
            with pytest.raises(ReplyTimeout):
                await client.request("GET", upstream.url + "/none", timeout_s=0.1)
            await until(lambda: upstream.calls[-1].peer_closed_s is not None)
            await client.close()
        with pytest.raises(ConnectFailed):
            await HttpClient().request("GET", upstream.url + "/gone")

    run(main())


def test_connections_are_reused_and_expire_before_the_server_closes_them() -> None:
    async def main() -> None:
        async def script(call: Call) -> None:
            extra = b"keep-alive: timeout=2\r\n" if call.path == "/short" else b""
            await call.reply(200, b"{}", extra=extra)

        async with FakeUpstream(script, health=0) as upstream:
            client = HttpClient(ClientLimits(idle_s=60.0))
            for _ in range(5):
                assert (await client.request("GET", upstream.url + "/a")).json() == {}
            assert upstream.peers("/a", "/short") == 1
            await client.request("GET", upstream.url + "/short")
            await asyncio.sleep(1.1)  # the server announced 2 s; a second of margin is kept
            await client.request("GET", upstream.url + "/a")
            assert upstream.peers("/a", "/short") == 2
            await client.close()

    run(main())


def test_a_stale_connection_is_replaced_unseen_but_only_once() -> None:
    async def main() -> None:
        answers = 0

        async def script(call: Call) -> None:
            nonlocal answers
            answers += 1
            if answers == 2:
                call.close()  # as a server does whose idle timer fired while the request was on its way
            else:
                await call.reply(200, b"{}")

        async with FakeUpstream(script, health=0) as upstream:
            client = HttpClient()
            for _ in range(2):
                assert (await client.request("POST", upstream.url, body=b"x")).status == 200
            assert answers == 3
            assert upstream.peers("/") == 2
            await client.close()

        async def dies(call: Call) -> None:
            call.reset()

        async with FakeUpstream(dies) as upstream:
            client = HttpClient()
            with pytest.raises(ConnectionCut):
                await client.request("POST", upstream.url, body=b"x")
            assert len(upstream.calls) == 1, "a request on a fresh connection is never sent twice"
            await client.close()

    run(main())


def test_stream_pauses_a_fast_server_and_closes_when_left() -> None:
    async def main() -> None:
        written = 0

        async def script(call: Call) -> None:
            nonlocal written
            await call.sse_head()
            try:
                for _ in range(4000):
                    await call.chunk(b"d" * 10_000)
                    written += 10_000
            except ConnectionError:
                call.keep_alive = False

        async with FakeUpstream(script, health=0) as upstream:
            client = HttpClient(ClientLimits(read_buffer_bytes=100_000))
            async with client.stream("GET", upstream.url) as stream:
                assert stream.status == 200
                first = await anext(aiter(stream))
                assert first.startswith(b"ddd")
                before = -1
                while before != written:  # until the socket buffers are full
                    before = written
                    await asyncio.sleep(0.1)
                assert written < 30_000_000
            await until(lambda: not upstream.calls[0].keep_alive)
            await client.close()

    run(main())


def test_server_and_client_together() -> None:
    async def main() -> None:
        def echo(request: Request, responder: Responder) -> None:
            responder.send(200, request.body)

        server = HttpServer(echo)
        await server.start()
        client = HttpClient()
        reply = await client.request("POST", f"http://127.0.0.1:{server.port}/", body=b"a" * 300_000)
        assert reply.body == b"a" * 300_000
        await client.close()
        await server.stop()

    run(main())


def test_a_sweep_does_not_close_a_connection_that_was_just_dialled() -> None:
    async def main() -> None:
        class Transport:
            closed = False

            def set_write_buffer_limits(self, high: int) -> None:
                pass

            def get_extra_info(self, name: str) -> None:
                pass

            def close(self) -> None:
                self.closed = True

        pool = Pool("127.0.0.1", 1)
        connection = ClientConnection(pool)
        transport = Transport()
        connection.connection_made(transport)  # type: ignore[arg-type]
        connection.check(pool.clock())
        assert not transport.closed
        connection.check(pool.clock() + 1000)
        assert transport.closed

    run(main())


@pytest.mark.parametrize("connection", [ClientConnection, ServerConnection])
def test_a_connection_has_every_method_of_a_protocol(connection: type) -> None:
    """They do not inherit from it, and an event loop that misses one only logs that."""
    wanted = {name for kind in (asyncio.BaseProtocol, asyncio.Protocol) for name in vars(kind) if name[0] != "_"}
    assert {name for name in wanted if not callable(getattr(connection, name, None))} == set()
