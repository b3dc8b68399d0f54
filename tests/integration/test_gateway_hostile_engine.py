"""An engine that answers with damaged bytes: every request ends once, nothing crashes, nobody's counters are left."""

import asyncio
import logging
import random

import pytest

from tests.support.gateway import DONE, ROLE, chat, frame, front, usage_frame, whole
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.gateway.settings import HealthSettings
from weighbridge.http import ExchangeFailed

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECES = (
    *(b"\r\n", b"\n", b"0\r\n\r\n", b"\0", b"\xff\xfe", b": \n\n", b"data:", b"transfer-encoding: chunked\r\n"),
    *(b"content-length: 5\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b'{"error":{"message":"x"}}', b"data: [DONE]\n\n"),
    *(
        b"content-encoding: gzip\r\n",
        b"5\r\nhello\r\n",
        b"x" * 5000,
        b'"usage":{"prompt_tokens":-1}',
        b"[]",
        b"\x1f\x8b",
    ),
    *(b'"usage":{"prompt_tokens":1e400,"completion_tokens":null}', b"HTTP/1.0 200 OK\r\n\r\n", b"set-cookie: a=b\r\n"),
)


def wire(rng: random.Random) -> bytes:
    """A good reply, damaged at a few places or not at all."""
    if rng.random() < 0.6:
        body = b"".join((ROLE, frame("a"), frame("b"), frame(finish="stop"), usage_frame(), DONE))
        size = rng.choice((7, 60, 500))
        parts = [body[i : i + size] for i in range(0, len(body), size)]
        data = SSE + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in parts) + b"0\r\n\r\n"
    else:
        body = whole()
        data = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (
            rng.choice((200, 200, 200, 204, 206, 301, 400, 401, 404, 418, 429, 500, 503, 999)),
            len(body),
        )
        data += body
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        at = rng.randrange(len(data) + 1)
        cut = rng.choice((0, 0, 1, 3, 40))
        data = data[:at] + rng.choice((b"", *PIECES)) + data[at + cut :]
    return data


@pytest.mark.parametrize("kind", ["embedded", "llamacpp", "openai"])
@pytest.mark.parametrize("seed", range(3))
def test_damaged_replies(seed: int, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)

    async def main() -> None:
        rng = random.Random(seed)
        wrong: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))

        async def script(call: Call) -> None:
            data = wire(rng)
            for _ in range(rng.randrange(1, 5)):
                size = rng.randrange(1, len(data) + 2)
                await call.write(data[:size])
                data = data[size:]
                await asyncio.sleep(0)
            await call.write(data)
            call.close()

        health = HealthSettings(interval_s=0.2, timeout_s=2.0, eject_failures=10**6)
        settings = {"health": health, "retry_share": 1.0}
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields={"kind": kind}, **settings) as f:

            async def one() -> None:
                try:
                    reply = await f.post(chat(rng.random() < 0.6))
                except ExchangeFailed:
                    return
                assert reply.status != 500, "the gateway itself failed"
                assert reply.header(b"set-cookie") is None

            for _ in range(30):
                await asyncio.gather(*(one() for _ in range(5)))
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()
            assert wrong == []

    run(main())
    assert [r.getMessage() for r in caplog.records] == []
