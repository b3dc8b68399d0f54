"""The relay against scripted engines: bytes, usage frames, errors, retries, cancellation."""

import asyncio
import json
import random
import time
from typing import Any

import pytest

from tests.support.gateway import DONE, ROLE, answer, chat, data_of, frame, front, text_of, usage_frame, whole
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream


def test_stream_and_whole_replies_pass_through() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            reply = await f.post(chat(stream=False))
            assert reply.status == 200
            assert reply.body == whole()
            assert reply.header(b"x-request-id")
            reply = await f.post(chat())
            assert reply.status == 200
            assert reply.body == b"".join((ROLE, frame("a"), frame("b"), frame("c"), frame(finish="stop"), DONE))
            assert reply.header(b"content-length") is None
            assert reply.header(b"content-encoding") is None
            assert reply.header(b"cache-control") == b"no-cache"
            assert reply.header(b"x-accel-buffering") == b"no"
            f.assert_idle()

    run(main())


def test_usage_frame_reaches_only_a_client_that_asked() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            asked = data_of((await f.post(chat(stream_options={"include_usage": True}))).body)
            assert [json.loads(d).get("usage") is not None for d in asked[:-1]] == [False] * 5 + [True]
            assert json.loads(asked[-2])["choices"] == []
            assert asked[-1] == "[DONE]"
            silent = data_of((await f.post(chat())).body)
            assert silent == [*asked[:-2], "[DONE]"]
            refused = data_of((await f.post(chat(stream_options={"include_usage": False}))).body)
            assert refused == silent
            for call in upstream.calls:
                assert json.loads(call.body)["stream_options"]["include_usage"] is True
            decision = f.gateway.driver.decisions[-1]
            assert decision.outcome is not None
            assert (decision.outcome.prompt_tokens, decision.outcome.output_tokens) == (9, 3)

    run(main())


def test_edits_splice_and_leave_every_other_byte() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, instance_fields={"kind": "vllm"}) as f:
            body = (
                b'{ "z":1e-7, "model" : "m","a":-0.0,"big":123456789012345678901234567890,\n"messages":[{"role":"user",'
                b'"content":"\\u4f60 \xf0\x9f\x99\x82"}], "tools":[{"z":1,"a":2,"m":3}],"stream":true,"max_tokens":5 }'
            )
            assert (await f.post(body)).status == 200
            sent = upstream.calls[0].body
            assert sent.replace(b'"stream_options":{"include_usage":true},', b"") == body
            assert (await f.post(body.replace(b"true", b"false"))).status == 200
            assert upstream.calls[1].body == body.replace(b"true", b"false")

    run(main())


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_bytes_in_are_bytes_out_over_any_cut(end: bytes, size: int) -> None:
    body = b"".join((b": PROCESSING\n\n", ROLE, frame("漢字🙂"), b": ping\n\n", frame("é"), frame(finish="stop"), DONE))
    body = body.replace(b"\n", end)

    async def script(call: Call) -> None:
        await call.sse_head()
        for start in range(0, len(body), size):
            await call.chunk(body[start : start + size])
            await asyncio.sleep(0)
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            reply = await f.post(chat(stream_options={"include_usage": True}))
            assert reply.body == body
            stripped = await f.post(chat())
            assert data_of(stripped.body) == data_of(body)
            assert text_of(stripped.body) == "漢字🙂é"

    run(main())


def test_frames_leave_as_they_arrive() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def script(call: Call) -> None:
            await call.sse_head()
            await call.chunk(frame("a"))
            await gate.wait()
            await call.chunk(frame("b"))
            await call.chunk(frame(finish="stop") + DONE)
            await call.last_chunk()

        async with FakeUpstream(script) as upstream, front(upstream) as f:
            url = f.url + "/v1/chat/completions"
            async with f.client.stream("POST", url, body=chat()) as stream:
                first = await anext(aiter(stream))
                assert first == frame("a"), "a frame is not held until more come"
                gate.set()
                rest = await stream.read()
            assert rest == frame("b") + frame(finish="stop") + DONE

    run(main())


def test_odd_frames_do_not_disturb() -> None:
    odd = [
        b'data: {"id":"x","choices":[],"prompt_filter_results":[]}\n\n',
        b'data: {"id":"x"}\n\n',
        b"data: not json\n\n",
        b"event: ping\ndata: {}\n\n",
        b"data\n\n",
        b"id: 1\nretry: 5\n\n",
    ]

    async def script(call: Call) -> None:
        await call.sse_head()
        for data in (*odd, ROLE, frame("a"), *odd, frame(finish="stop"), usage_frame(), DONE):
            await call.chunk(data)
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            reply = await f.post(chat())
            assert reply.body == b"".join((*odd, ROLE, frame("a"), *odd, frame(finish="stop"), DONE))
            assert f.gateway.driver.decisions[-1].outcome.outcome == "ok"  # type: ignore[union-attr]
            f.assert_idle()

    run(main())


Ending = Any


def test_hop_by_hop_headers_are_not_copied() -> None:
    async def script(call: Call) -> None:
        extra = (
            b"connection: keep-alive, x-private\r\nx-private: 1\r\nkeep-alive: timeout=5\r\nproxy-authenticate: x\r\n"
        )
        await call.reply(200, whole(), extra=extra + b"set-cookie: a=b\r\nx-engine: y\r\ntrailer: z\r\n")

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            reply = await f.post(chat(stream=False), expect="100-continue", x_custom="1", authorization="Bearer secret")
            names = [n for n, _ in reply.headers]
            assert b"x-engine" in names
            for name in (b"x-private", b"keep-alive", b"proxy-authenticate", b"set-cookie", b"trailer", b"connection"):
                assert name not in names
            sent = upstream.calls[0].headers
            assert set(sent) == {"host", "content-type", "accept-encoding", "x-request-id", "content-length"}
            assert "secret" not in upstream.calls[0].head.decode()

    run(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("moment", ["before_head", "after_head", "midway"])
@pytest.mark.parametrize("how", ["close", "abort", "half"])
def test_a_disconnect_reaches_the_engine_within_a_second(stream: bool, moment: str, how: str) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def script(call: Call) -> None:
            if moment != "before_head":
                if stream:
                    await call.sse_head()
                    if moment == "midway":
                        await call.chunk(ROLE + frame("a"))
                else:
                    await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")
                    if moment == "midway":
                        await call.write(b"{")
            reached.set()
            await call.wait_closed()

        async with FakeUpstream(script) as upstream, front(upstream) as f:
            _, writer = await asyncio.open_connection("127.0.0.1", f.gateway.port)
            body = chat(stream=stream)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            await reached.wait()
            await asyncio.sleep(0.02)
            left = time.monotonic()
            if how == "close":
                writer.close()
            elif how == "abort":
                writer.transport.abort()
            else:
                writer.write_eof()
            await until(lambda: upstream.calls[0].peer_closed_s is not None, 1.0)
            assert upstream.calls[0].peer_closed_s - left < 1.0  # type: ignore[operator]
            await until(lambda: not f.gateway.driver.flights)
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.outcome == "cancelled"
            assert all(e.up for e in f.gateway.driver.endpoints.values())
            f.assert_idle()
            writer.close()

    run(main())


def test_a_thousand_random_cancels_leave_every_counter_at_zero() -> None:
    rng = random.Random(7)

    async def script(call: Call) -> None:
        fate = rng.random()
        if fate < 0.05:
            call.reset()
            return
        if fate < 0.1:
            await call.reply(500, b"{}")
            return
        await asyncio.sleep(rng.random() * 0.02)
        if not json.loads(call.body).get("stream"):
            await call.reply(200, whole())
            return
        await call.sse_head()
        for _ in range(10):
            await call.chunk(frame("a"))
            await asyncio.sleep(rng.random() * 0.01)
        if fate < 0.15:
            call.reset()
            return
        await call.chunk(frame(finish="stop") + DONE)
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as one, FakeUpstream(script) as two, front(one, two) as f:

            async def client(number: int) -> str:
                stream = rng.random() < 0.7
                limit_s = rng.random() * 0.15 if number % 2 else 10.0
                try:
                    async with asyncio.timeout(limit_s):
                        await f.post(chat(stream=stream))
                except TimeoutError:
                    return "cancelled"
                return "ended"

            results = []
            for _ in range(10):
                results += await asyncio.gather(*(client(n) for n in range(100)))
            assert 150 < results.count("cancelled") < 850
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()
            assert all(r.outcome is not None for r in list(f.gateway.driver.decisions)[-20:])

    run(main())
