"""What gateways were reported to get wrong and no other test of ours shows; all of it: `docs/reference/hazards.md`."""

import asyncio
import gzip
import json
from typing import Any

import pytest

from tests.support.gateway import DONE, ROLE, answer, chat, data_of, frame, front, text_of, usage_frame, whole
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.instance import Limits
from weighbridge.http import ClientLimits
from weighbridge.routing.router import RouterSettings


def sse(*choices: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n" for choice in choices)


def delta(index: int, finish: str | None = None, logprobs: Any = None, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}


def call_delta(index: int, arguments: str, **fields: Any) -> dict[str, Any]:
    return {"index": index, "function": {"arguments": arguments}, **fields}


CHOICES = sse(
    delta(0, role="assistant", content=""),
    delta(1, role="assistant", content=""),
    delta(1, content="b", logprobs={"content": [{"token": "b", "logprob": -0.1}]}),
    delta(0, content="a", logprobs={"content": [{"token": "a", "logprob": -0.2}]}),
    delta(1, "length"),
    delta(0, content="a"),
    delta(0, "stop"),
)
CALLS = sse(
    delta(0, role="assistant", content=None),
    delta(0, tool_calls=[call_delta(0, "", id="c0", type="function")]),
    delta(0, tool_calls=[call_delta(1, '{"a"', id="c1", type="function"), call_delta(0, '{"b":')]),
    delta(0, tool_calls=[call_delta(0, "1}")]),
    delta(0, tool_calls=[call_delta(1, ":2}")]),
    delta(0, "tool_calls"),
)


@pytest.mark.parametrize("body", [CHOICES, CALLS], ids=["choices", "tool_calls"])
@pytest.mark.parametrize("asked", [True, False])
def test_interleaved_choices_and_tool_calls_keep_their_index_and_order(body: bytes, asked: bool) -> None:
    async def script(call: Call) -> None:
        await call.sse_head()
        await call.pieces(b"%x\r\n%b\r\n" % (len(body), body), 11)
        await call.chunk(usage_frame() + DONE)
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            options = {"stream_options": {"include_usage": True}} if asked else {}
            reply = await f.post(chat(n=2, logprobs=True, **options))
            assert reply.body == body + (usage_frame() if asked else b"") + DONE
            f.assert_idle()

    run(main())


def _two_lines(body: bytes) -> bytes:
    """Each JSON object over two `data:` lines: a line end stands for one between tokens."""
    return body.replace(b', "choices"', b',\ndata: "choices"')


SPELLINGS: dict[str, Any] = {
    "lf": lambda body: body,
    "crlf": lambda body: body.replace(b"\n", b"\r\n"),
    "cr": lambda body: body.replace(b"\n", b"\r"),
    "mixed": lambda body: body.replace(b"\n\n", b"\r\n\n", 3),
    "no space": lambda body: body.replace(b"data: ", b"data:"),
    "two lines": _two_lines,
    "two lines crlf": lambda body: _two_lines(body).replace(b"\n", b"\r\n"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("size", [1, 50])
def test_every_spelling_of_a_stream_is_counted_the_same_and_passes_at_once(spelling: str, size: int) -> None:
    frames = (ROLE, frame("a"), frame("b"), frame(finish="stop"), usage_frame(11, 2), DONE)
    first, *rest = (SPELLINGS[spelling](data) for data in frames)

    async def main() -> None:
        seen = asyncio.Event()

        async def script(call: Call) -> None:
            await call.sse_head()
            for data in (first, b"".join(rest)):
                for start in range(0, len(data), size):
                    await call.chunk(data[start : start + size])
                await asyncio.wait_for(seen.wait(), 5.0)
            await call.last_chunk()

        async with FakeUpstream(script) as upstream, front(upstream) as f:
            url = f.url + "/v1/chat/completions"
            async with f.client.stream("POST", url, body=chat()) as reply:
                body = await anext(aiter(reply))
                seen.set()
                body += await reply.read()
            assert [json.loads(d) for d in data_of(body) if d != "[DONE]"] == [
                json.loads(d) for d in data_of(b"".join(frames[:4]))
            ]
            assert text_of(body) == "ab"
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert (outcome.outcome, outcome.prompt_tokens, outcome.output_tokens) == ("ok", 11, 2)

    run(main())


def test_comments_keep_a_stream_alive_and_are_no_token() -> None:
    async def script(call: Call) -> None:
        await call.sse_head()
        for _ in range(16):
            await call.chunk(b": PROCESSING\n\n")
            await asyncio.sleep(0.1)
        await call.chunk(frame("a") + frame(finish="stop") + DONE)
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream, client=ClientLimits(read_s=0.2)) as f:
            task = asyncio.create_task(f.post(chat()))
            await until(lambda: any(x.responder.started for x in f.gateway.driver.flights.values()))
            (flight,) = f.gateway.driver.flights.values()
            await asyncio.sleep(1.2)
            assert flight.first_token_s is None
            reply = await task
            assert text_of(reply.body) == "a"
            assert all(d in ("[DONE]",) or d.startswith("{") for d in data_of(reply.body)), "no comment became data"

    run(main())


@pytest.mark.parametrize("status", [200, 400, 500])
@pytest.mark.parametrize("empty", [False, True])
def test_an_engine_that_compresses_unasked_is_passed_on_readable(status: int, empty: bool) -> None:
    plain = b"" if empty else whole() if status == 200 else b'{"error":{"message":"no","code":5}}'
    body = plain if empty else gzip.compress(plain)

    async def script(call: Call) -> None:
        await call.reply(status, body, extra=b"content-encoding: gzip\r\n")

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            reply = await f.post(chat(stream=False))
            assert reply.status == (502 if status == 500 else status)
            packed = reply.header(b"content-encoding") == b"gzip"
            told = gzip.decompress(reply.body) if packed and reply.body else reply.body
            assert told == plain or json.loads(told)["error"]["message"]
            assert int(reply.header(b"content-length")) == len(reply.body)
            f.assert_idle()

    run(main())


async def ask(port: int, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    reply = await reader.read(-1)
    writer.close()
    return reply


@pytest.mark.parametrize(
    "name", [b"x-session-id", b"user-agent", b"x-request-id", b"traceparent", b"x-weighbridge-allow"]
)
def test_headers_that_are_not_text_do_no_harm(name: bytes) -> None:
    body = chat(stream=False)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n%b: \xff\xfe\xe6\xa8\xa1\r\n" % name

    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            reply = await ask(f.gateway.port, head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            assert reply.startswith(b"HTTP/1.1 200")
            assert (await f.get("/metrics", admin=True)).status == 200
            f.assert_idle()

    run(main())


def test_a_chunked_request_reaches_the_engine_in_one_frame() -> None:
    body = chat(stream=False)
    pieces = b"".join(b"1;ext=%d\r\n%c\r\n" % (n, byte) for n, byte in enumerate(body))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"

    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, instance_fields={"kind": "openai"}) as f:
            reply = await ask(f.gateway.port, head + b"\r\n" + pieces + b"0\r\nx-trailer: y\r\n\r\n")
            assert reply.startswith(b"HTTP/1.1 200")
            (call,) = upstream.calls
            assert call.body == body
            assert call.headers["content-length"] == str(len(body))
            assert "transfer-encoding" not in call.headers
            assert "x-trailer" not in call.headers
            for bad in (b"content-length: 5\r\n", b"transfer-encoding: gzip\r\n"):
                assert (await ask(f.gateway.port, head + bad + b"\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 400")
            assert len(upstream.calls) == 1

    run(main())


@pytest.mark.parametrize("ending", ["eof", "reset"])
def test_after_a_role_frame_was_sent_nothing_is_replayed(ending: str) -> None:
    async def broken(call: Call) -> None:
        await call.sse_head()
        await call.chunk(ROLE)
        await asyncio.sleep(0.05)  # so that a reset does not overtake it
        call.reset() if ending == "reset" else call.close()

    async def main() -> None:
        async with FakeUpstream(broken) as bad, FakeUpstream(answer) as good, front(bad, good) as f:
            for _ in range(4):
                bodies = [json.loads(d) for d in data_of((await f.post(chat())).body) if d != "[DONE]"]
                roles = [b for b in bodies if "error" not in b and b["choices"][0]["delta"].get("role")]
                assert len(roles) == 1
                assert ("error" in bodies[-1]) == (len(bodies) == 2)
            assert bad.calls
            assert len(bad.calls) + len(good.calls) == 4
            f.assert_idle()

    run(main())


@pytest.mark.parametrize(("workers", "status", "reason"), [(1, 429, b"queue_timeout"), (0, 503, b"no_instance")])
def test_a_wait_that_ends_says_whether_there_is_capacity(workers: int, status: int, reason: bytes) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def script(call: Call) -> None:
            await gate.wait()
            await call.reply(200, whole())

        async with FakeUpstream(script) as one:
            router = RouterSettings(policy="least_tokens", dispatch="hold", max_held_s=0.3)
            fields = {"limits": Limits(max_context=4096, max_sequences=1)}
            async with front(one, instance_fields=fields, router=router) as f:
                running = asyncio.create_task(f.post(chat(stream=False)))
                await until(lambda: len(one.calls) == 1)
                if not workers:
                    f.gateway.health.drain(f.gateway.driver.endpoints["i0"])
                reply = await f.post(chat(stream=False))
                assert reply.status == status
                assert reply.header(b"x-weighbridge-reason") == reason
                assert int(reply.header(b"retry-after")) >= 1
                gate.set()
                assert (await running).status == 200
                f.assert_idle()

    run(main())
