"""Large bodies take turns: everybody else waits for at most one of them, and nothing is lost or held up for ever."""

import asyncio
import contextlib
import random
import socket
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.loop import run, until
from weighbridge.http import HttpServer, Request, Responder, ServerLimits
from weighbridge.http.server import Handler
from weighbridge.http.turns import LARGE_BYTES, Turns

LARGE = 1 << 20


def post(body: bytes, more: bytes = b"") -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: a\r\n%bcontent-length: %d\r\n\r\n%b" % (more, len(body), body)


async def listen(handler: Handler, limits: ServerLimits | None = None) -> HttpServer:
    server = HttpServer(handler, limits)
    await server.start()
    return server


async def ask(server: HttpServer, wire: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(wire)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return head[9:12] + b" " + await reader.readexactly(length)
    finally:
        writer.close()


def test_whoever_asks_meanwhile_waits_for_one_large_body_and_not_for_all_that_are_ready() -> None:
    """Counted, not timed: how many large bodies are handed over between a small request's sending and its answer."""
    order: list[str] = []
    small: list[socket.socket] = []

    def handler(request: Request, responder: Responder) -> None:
        size = len(request.body)
        order.append("large" if size > LARGE_BYTES else "small")
        if size > LARGE_BYTES and small:  # somebody asks just now: the kernel has it before the next look at sockets
            small.pop().send(post(b"hello"))
            order.append("asked")
        responder.send(200, b"%d" % size)

    async def main() -> None:
        server = await listen(handler)
        for _ in range(8):
            client = socket.create_connection(("127.0.0.1", server.port))
            small.append(client)
        clients = list(small)
        await until(lambda: len(server.connections) == 8)
        answers = await asyncio.gather(*(ask(server, post(b"x" * LARGE)) for _ in range(40)))
        assert answers == [b"200 %d" % LARGE] * 40
        await until(lambda: order.count("small") == 8)
        for client in clients:
            client.close()
        await server.stop()

    run(main())
    waited = []
    pending: list[int] = []
    for event in order:
        if event == "asked":
            pending.append(0)
        elif event == "large":
            pending = [n + 1 for n in pending]
        else:
            waited.append(pending.pop(0))
    assert len(waited) == 8
    assert max(waited) <= 1, f"small requests waited for {waited} large bodies"


def test_a_pass_of_the_loop_takes_one_slice() -> None:
    """Connections that are in the middle of their bodies: between two passes at most one is read from."""
    server_reads: list[int] = []

    async def main() -> None:
        server = await listen(lambda request, responder: responder.send(200, b"%d" % len(request.body)))
        takes = [0]
        original = Turns._next

        def counted(self: Turns) -> None:
            takes[0] += 1
            before = sum(c._body_bytes for c in server.connections)
            original(self)
            server_reads.append(sum(c._body_bytes for c in server.connections) - before)

        server.turns._next = counted.__get__(server.turns)  # type: ignore[method-assign]
        answers = await asyncio.gather(*(ask(server, post(b"x" * (4 * LARGE))) for _ in range(10)))
        assert answers == [b"200 %d" % (4 * LARGE)] * 10
        assert takes[0] >= 10 * 4 * LARGE // (256 * 1024) // 2, "they were read in slices"
        assert server.buffered_bytes == 0
        await server.stop()

    run(main())


def test_a_slow_large_body_holds_up_nobody() -> None:
    async def main() -> None:
        server = await listen(lambda request, responder: responder.send(200, b"%d" % len(request.body)))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        wire = post(b"y" * LARGE)
        writer.write(wire[: 2 * LARGE_BYTES])  # and then nothing
        await until(lambda: server.buffered_bytes > LARGE_BYTES)
        answers = await asyncio.gather(*(ask(server, post(b"x" * LARGE)) for _ in range(10)))
        assert answers == [b"200 %d" % LARGE] * 10
        writer.write(wire[2 * LARGE_BYTES :])
        assert (await reader.readuntil(b"\r\n\r\n"))[9:12] == b"200"
        writer.close()
        await server.stop()

    run(main())


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind() -> None:
    async def main() -> None:
        handled = []

        def handler(request: Request, responder: Responder) -> None:
            handled.append(len(request.body))
            responder.send(200, b"ok")

        server = await listen(handler)
        for cut in (2 * LARGE_BYTES, LARGE - 1, LARGE + 100):
            clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(5)]
            for client in clients:
                client.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    client.send(post(b"x" * LARGE)[:cut])
            await until(lambda: len(server.connections) == 5)
            for client in clients:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
                client.close()
            await until(lambda: not server.connections)
            assert server.buffered_bytes == 0
        assert not server.turns._line
        assert not server.turns._since
        await server.stop()

    run(main())


def test_the_time_in_the_line_is_not_taken_from_the_clients_deadline() -> None:
    class Waiting:
        def __init__(self, goes_on: bool = True) -> None:
            self.turns: list[float] = []
            self.goes_on = goes_on

        def take_turn(self, waited_s: float) -> bool:
            self.turns.append(waited_s)
            return self.goes_on

    async def main() -> None:
        turns = Turns()
        gone, stays, other = Waiting(False), Waiting(), Waiting()
        for each in (gone, stays, other, stays):
            turns.wait(each)  # type: ignore[arg-type]
        assert stays in turns
        time.sleep(0.02)
        await asyncio.sleep(0)
        assert (len(gone.turns), len(stays.turns), len(other.turns)) == (1, 1, 0), "one that is gone takes no turn"
        await asyncio.sleep(0)
        assert (len(stays.turns), len(other.turns)) == (1, 1), "waiting twice is waiting once"
        assert other.turns[0] >= 0.019
        assert stays not in turns
        for _ in range(3):
            await asyncio.sleep(0)
        assert not turns._going

    run(main())


def test_a_body_that_waits_longer_than_its_deadline_is_not_refused() -> None:
    async def main() -> None:
        def handler(request: Request, responder: Responder) -> None:
            time.sleep(0.05)  # a gateway that is slow with each
            responder.send(200, b"%d" % len(request.body))

        server = await listen(handler, ServerLimits(body_s=0.4, head_s=0.4))
        answers = await asyncio.gather(*(ask(server, post(b"x" * LARGE)) for _ in range(24)))
        assert answers == [b"200 %d" % LARGE] * 24
        await server.stop()

    run(main())


def test_what_came_before_a_fault_is_answered_first() -> None:
    async def main() -> None:
        server = await listen(lambda request, responder: responder.send(200, b"%d" % len(request.body)))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(b"x" * 100_000) + b"nonsense\r\n\r\n")
        data = await reader.read(-1)
        first, second = data.split(b"HTTP/1.1 ")[1:]
        assert (first[:3], second[:3]) == (b"200", b"400")
        writer.close()
        await server.stop()

    run(main())


sizes = st.lists(st.sampled_from([0, 5, 60_000, LARGE_BYTES, LARGE_BYTES + 1, 300_000, LARGE]), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=4), st.integers(0, 2**32), st.booleans())
def test_every_body_arrives_whole_and_in_order(connections: list[list[int]], seed: int, chunked: bool) -> None:
    rng = random.Random(seed)

    def handler(request: Request, responder: Responder) -> None:
        responder.send(200, b"%d:%d" % (len(request.body), sum(request.body[:: max(1, len(request.body) // 97)])))

    async def one(server: HttpServer, bodies: list[bytes]) -> list[bytes]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        wire = b""
        for body in bodies:
            if chunked and body:
                step = rng.randrange(1000, 400_000)
                pieces = [body[at : at + step] for at in range(0, len(body), step)]
                coded = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)
                wire += b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"
            else:
                wire += post(body)

        async def send() -> None:
            at = 0
            while at < len(wire):
                size = rng.choice((1, 1000, 70_000, 300_000, 2_000_000))
                writer.write(wire[at : at + size])
                at += size
                await writer.drain()
                await asyncio.sleep(0)

        async def receive() -> list[bytes]:
            replies = []
            for _ in bodies:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                replies.append(await reader.readexactly(length))
            return replies

        _, replies = await asyncio.gather(send(), receive())
        writer.close()
        return replies

    async def main() -> None:
        server = await listen(handler)
        asked = [[rng.randbytes(size) for size in row] for row in connections]
        found = await asyncio.gather(*(one(server, row) for row in asked))
        assert found == [[b"%d:%d" % (len(b), sum(b[:: max(1, len(b) // 97)])) for b in row] for row in asked]
        assert server.buffered_bytes == 0
        await server.stop()

    run(main())
