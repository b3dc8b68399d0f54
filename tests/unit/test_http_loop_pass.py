"""The end of a pass of the event loop: what waits for it, and in which order it comes."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.gateway import answer, chat, front, whole
from tests.support.loop import run
from tests.support.upstream import FakeUpstream
from weighbridge.core.errors import LogError
from weighbridge.http import HttpServer, Request, Responder
from weighbridge.http.loop_pass import MOST_BYTES, pass_of
from weighbridge.routing.policy import Choice, View


class Transport:
    """Writes down what it is given."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name = name
        self.closing = False
        self._log = log

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self._log.append((self.name, data))


def test_work_comes_before_writes_and_both_after_what_is_ready() -> None:
    async def main() -> None:
        log: list[Any] = []
        loop = asyncio.get_running_loop()
        at_end = pass_of(loop)
        assert at_end is pass_of(loop)
        a, b, gone = Transport("a", log), Transport("b", log), Transport("gone", log)

        def work() -> None:
            log.append("work")
            at_end.write(b, b"3")  # type: ignore[arg-type]
            at_end.later(lambda: log.append("more"))

        loop.call_soon(log.append, "ready")
        at_end.write(a, b"1")  # type: ignore[arg-type]
        loop.call_soon(log.append, "ready")
        at_end.write(gone, b"2")  # type: ignore[arg-type]
        at_end.later(work)
        gone.closing = True
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert log == ["ready", "work", "more", ("a", b"1"), ("b", b"3"), "ready"]
        at_end.write(a, b"4")  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert log[-1] == ("a", b"4"), "the next pass has an end as well"

    run(main())


def test_a_work_or_write_that_raises_ends_neither_the_others_nor_the_passes_to_come() -> None:
    async def main() -> None:
        log: list[Any] = []
        at_end = pass_of(asyncio.get_running_loop())

        def broken() -> None:
            raise ValueError("a bug")

        class Deaf(Transport):
            def write(self, data: bytes) -> None:
                raise RuntimeError("closed")

        a, deaf = Transport("a", log), Deaf("deaf", log)
        at_end.later(broken)
        at_end.later(lambda: log.append("work"))
        at_end.write(deaf, b"1")  # type: ignore[arg-type]
        at_end.write(a, b"2")  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert log == ["work", ("a", b"2")]
        at_end.write(a, b"3")  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert log[-1] == ("a", b"3")

    run(main())


def test_who_writes_without_a_pause_does_not_wait_for_the_end() -> None:
    async def main() -> None:
        log: list[Any] = []
        at_end, transport = pass_of(asyncio.get_running_loop()), Transport("t", log)
        for _ in range(3):
            at_end.write(transport, bytes(MOST_BYTES // 2))  # type: ignore[arg-type]
        assert len(log) == 3
        at_end.write(transport, b"x")  # type: ignore[arg-type]
        assert len(log) == 3

    run(main())


def test_a_stream_is_written_at_once_and_never_before_what_waits_on_its_connection() -> None:
    def handler(request: Request, responder: Responder) -> None:
        if request.path == "/whole":
            responder.send(200, b"whole")
        else:
            responder.start_sse()
            responder.write(b"data: a\n\n")
            written.append(pass_of(asyncio.get_running_loop()).number)
            responder.end(b"data: b\n\n")

    async def main() -> None:
        server = HttpServer(handler)
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        asks = [b"GET /%b HTTP/1.1\r\nhost: h\r\n\r\n" % path for path in (b"whole", b"stream", b"whole", b"whole")]
        writer.write(b"".join(asks[:3]) + asks[3].replace(b"host", b"connection: close\r\nhost"))
        got = await reader.read()
        pieces = [got.index(b"whole"), got.index(b"data: a"), got.index(b"data: b"), got.rindex(b"whole")]
        assert pieces == sorted(pieces)
        assert got.count(b"HTTP/1.1 200") == 4
        assert written == [2], "the answer that waited was written first, and the stream did not wait"
        writer.close()
        await server.stop()

    written: list[int] = []
    run(main())


class Broken:
    """A policy whose fault is not made good by the router."""

    def choose(self, view: View) -> Choice:
        raise LogError("broken")


def test_a_broken_router_answers_its_request_and_no_other_suffers() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            router = f.gateway.driver.router
            good = router.policy
            router.policy = Broken()
            reply = await f.post(chat(stream=False))
            assert reply.status == 500
            assert reply.header(b"x-weighbridge-reason") == b"internal_error"
            assert not f.gateway.driver.flights
            assert not router.live_requests
            router.policy = good
            assert (await f.post(chat(stream=False))).body == whole()

    run(main())
