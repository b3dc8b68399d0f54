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


async def _eof(call: Call) -> None:
    call.close()


async def _reset(call: Call) -> None:
    call.reset()


async def _last_chunk(call: Call) -> None:
    await call.last_chunk()


async def _half_frame(call: Call) -> None:
    await call.chunk(b'data: {"id":"x","choices":[{"delta":{"content":"half')
    call.close()


@pytest.mark.parametrize("ending", [_eof, _reset, _last_chunk, _half_frame])
def test_a_dying_stream_gets_an_error_frame_and_an_end(ending: Any) -> None:
    async def script(call: Call) -> None:
        await call.sse_head()
        for _ in range(20):
            await call.chunk(frame("t"))
        await asyncio.sleep(0.05)  # so that a reset does not overtake the frames
        await ending(call)

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            reply = await f.post(chat())
            events = data_of(reply.body)
            error = json.loads(events[-1])["error"]
            assert error["code"] == "upstream_error"
            assert "127.0.0.1" not in events[-1]
            assert str(upstream.port) not in events[-1]
            assert "[DONE]" not in events
            assert sum(1 for e in events if "error" in e) == 1
            assert len(upstream.calls) == 1, "nothing is replayed after the first byte"
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.outcome.startswith("failed")
            f.assert_idle()

    run(main())


def test_an_upstream_error_frame_is_forwarded_once_and_counts_as_failure() -> None:
    async def script(call: Call) -> None:
        await call.sse_head()
        await call.chunk(frame("t"))
        await call.chunk(b'data: {"error":{"message":"boom","type":"server_error","param":null,"code":null}}\n\n')
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            events = data_of((await f.post(chat())).body)
            assert [json.loads(e)["error"]["message"] for e in events if "error" in e] == ["boom"]
            assert f.gateway.driver.decisions[-1].outcome.outcome.startswith("failed")  # type: ignore[union-attr]
            f.assert_idle()

    run(main())


def test_finish_reason_without_done_is_success() -> None:
    async def script(call: Call) -> None:
        await call.sse_head()
        await call.chunk(frame("t"))
        await call.chunk(frame(finish="stop"))
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            events = data_of((await f.post(chat())).body)
            assert len(events) == 2
            assert f.gateway.driver.decisions[-1].outcome.outcome == "ok"  # type: ignore[union-attr]

    run(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["reset", "eof", "status", "head", "half", "refused"])
def test_a_failure_before_the_first_byte_is_retried_unseen(stream: bool, how: str) -> None:
    async def broken(call: Call) -> None:
        if how == "reset":
            call.reset()
        elif how == "eof":
            call.close()
        elif how == "status":
            await call.reply(500, b'{"error":"x"}')
        elif how == "head":
            await call.sse_head()
            call.close()
        elif stream:
            await call.sse_head()
            call.reset()
        else:
            await call.write(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n" + whole()[:50])
            call.close()

    async def main() -> None:
        async with FakeUpstream(broken) as bad, FakeUpstream(answer) as good, front(bad, good) as f:
            if how == "refused":
                await bad.__aexit__()
                bad._server = None
            for _ in range(6):
                reply = await f.post(chat(stream=stream))
                assert reply.status == 200
                assert text_of(reply.body) == "abc" if stream else json.loads(reply.body)
            if how != "refused":
                assert bad.calls, "the broken engine was tried"
            f.assert_idle()
            if how == "refused":
                await bad.__aenter__()

    run(main())


def test_all_attempts_fail_with_502_in_the_envelope() -> None:
    async def broken(call: Call) -> None:
        call.reset()

    async def main() -> None:
        async with FakeUpstream(broken) as one, FakeUpstream(broken) as two, front(one, two) as f:
            reply = await f.post(chat())
            assert reply.status == 502
            assert reply.json()["error"]["code"] == "upstream_error"
            assert reply.header(b"x-weighbridge-reason") == b"attempts_exhausted"
            assert len(one.calls) + len(two.calls) == 3
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_client_errors_pass_through_once_and_do_not_eject(stream: bool, status: int) -> None:
    envelope = {"error": {"message": "too long", "type": "BadRequestError", "param": "input_tokens", "code": status}}

    async def script(call: Call) -> None:
        if status == 422:
            await call.reply(status, b'{"detail":"Unexpected fields in the request"}')
        else:
            await call.reply(status, json.dumps(envelope).encode(), extra=b"connection: close\r\n")
            call.close()

    async def main() -> None:
        async with FakeUpstream(script) as one, FakeUpstream(script) as two, front(one, two) as f:
            for n in range(30):
                reply = await f.post(chat(stream=stream))
                assert reply.status == status
                assert reply.header(b"connection") is None
                message = reply.json()["error"]["message"]
                assert message == ("Unexpected fields in the request" if status == 422 else "too long")
                assert len(one.calls) + len(two.calls) == n + 1, "never retried elsewhere"
            assert all(e.up for e in f.gateway.driver.endpoints.values())
            f.assert_idle()

    run(main())


def test_gzip_error_bodies_keep_header_and_bytes() -> None:
    import gzip

    packed = gzip.compress(b'{"error":{"message":"no"}}')

    async def script(call: Call) -> None:
        await call.reply(400, packed, extra=b"content-encoding: gzip\r\n")

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            reply = await f.post(chat(stream=False), accept_encoding="gzip, br, zstd")
            assert reply.status == 400
            assert upstream.calls[0].headers["accept-encoding"] == "identity"
            if reply.header(b"content-encoding") == b"gzip":
                assert gzip.decompress(reply.body) == gzip.decompress(packed)
            else:
                assert reply.json()["error"]["message"]

    run(main())


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


def test_hundreds_of_random_cancels_leave_every_counter_at_zero() -> None:
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
                results += await asyncio.gather(*(client(n) for n in range(40)))
            assert 50 < results.count("cancelled") < 350
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()
            assert all(r.outcome is not None for r in list(f.gateway.driver.decisions)[-20:])

    run(main())
