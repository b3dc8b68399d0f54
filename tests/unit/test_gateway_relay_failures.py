"""The relay against engines that fail: error frames, retries before the first byte, refusals that pass through."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.gateway import answer, chat, data_of, frame, front, text_of, whole
from tests.support.loop import run
from tests.support.upstream import Call, FakeUpstream


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
