"""What was observed of real engines and must not hurt: one test per hazard. Recordings are in tests/data/engines."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import DONE, answer, chat, frame, front, instance, usage_frame, whole
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.gateway.quota import Salts
from weighbridge.gateway.usage import usage_of_body
from weighbridge.gateway.usage_fields import Usage

ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"


def recorded(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((ENGINES / f"{name}.json").read_text())
    return value


def recorded_body(name: str) -> bytes:
    record = recorded(name)
    return json.dumps(record["json"]).encode() if "json" in record else record.get("text", "").encode()


@pytest.mark.parametrize(
    "name",
    ["vllm/notfound", "vllm/bad_ct", "vllm/abort_requests", "llamacpp/notfound", "transformers_serve/unknown_field"],
)
def test_errors_of_other_shapes_reach_the_client_in_the_envelope(name: str) -> None:
    """`{"detail": ...}`, lists, plain text: not every error of an engine is OpenAI's."""
    status = recorded(name)["status"]

    async def script(call: Call) -> None:
        await call.reply(status, recorded_body(name), recorded(name)["headers"].get("content-type", "text/plain"))

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            for stream in (True, False):
                reply = await f.post(chat(stream=stream))
                assert reply.status == status
                error = reply.json()["error"]
                assert isinstance(error["message"], str)
                assert error["message"]
            f.assert_idle()

    run(main())


def test_the_exact_numbers_of_a_too_long_prompt_reach_the_client() -> None:
    async def script(call: Call) -> None:
        await call.reply(400, recorded_body("llamacpp/err_oversize"))

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields={"kind": "llamacpp"}) as f:
            error = (await f.post(chat(stream=False))).json()["error"]
            assert error["type"] == "exceed_context_size_error"
            assert (error["n_prompt_tokens"], error["n_ctx"]) == (3031, 1024)

    run(main())


def test_a_budget_beyond_the_context_is_clipped_by_the_engine_and_settled_by_what_came() -> None:
    record = recorded("vllm/err_prompt_plus_max")
    assert record["status"] == 200
    assert record["json"]["choices"][0]["finish_reason"] == "length"

    async def script(call: Call) -> None:
        await call.reply(200, json.dumps(record["json"]).encode())

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields={"kind": "vllm"}) as f:
            assert (await f.post(chat(stream=False, max_tokens=500))).status == 200
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.output_tokens == record["json"]["usage"]["completion_tokens"] < 500
            f.assert_idle()

    run(main())


WITH_USAGE = sorted(
    p.relative_to(ENGINES).as_posix().removesuffix(".sse")
    for p in ENGINES.rglob("stream_*.sse")
    if b'"completion_tokens"' in p.read_bytes() and "anthropic" not in p.name
)


@pytest.mark.parametrize("name", WITH_USAGE)
def test_tokens_are_counted_by_usage_and_not_by_frames(name: str) -> None:
    """One frame may hold several tokens, half a character, or none."""
    body = (ENGINES / f"{name}.sse").read_bytes()
    frames = [json.loads(line[6:]) for line in body.splitlines() if line.startswith(b"data: {")]
    usage = next(f["usage"] for f in reversed(frames) if f.get("usage"))

    async def script(call: Call) -> None:
        await call.sse_head()
        await call.chunk(body)
        await call.last_chunk()

    async def main() -> None:
        kind = "transformers" if name.startswith("transformers") else "vllm"
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields={"kind": kind}) as f:
            await f.post(chat(stream_options={"include_usage": True}))
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.output_tokens == usage["completion_tokens"]
            assert outcome.prompt_tokens == usage["prompt_tokens"]

    run(main())


def test_usage_without_details_is_read() -> None:
    """`prompt_tokens_details` is null where the engine was not told to tell."""
    body = b'{"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10,"prompt_tokens_details":null}}'
    assert usage_of_body(body) == Usage(prompt_tokens=7, output_tokens=3)
    cached = usage_of_body(recorded_body("llamacpp/chat_repeat"))
    assert cached.cached_tokens == 36


@pytest.mark.parametrize("content", [b"null", b'""'])
def test_a_role_frame_is_no_first_token(content: bytes) -> None:
    """llama.cpp begins with `content: null`, vLLM with an empty string."""
    role = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":%b},"finish_reason":null}]}\n\n'
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.sse_head()
        await call.chunk(role % content)
        await go.wait()
        await call.chunk(frame("a"))
        await call.chunk(frame(finish="stop") + usage_frame() + DONE)
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            task = asyncio.create_task(f.post(chat()))
            await until(lambda: any(x.responder.started for x in f.gateway.driver.flights.values()))
            (flight,) = f.gateway.driver.flights.values()
            await asyncio.sleep(0.02)
            assert flight.first_token_s is None
            go.set()
            await task
            f.assert_idle()

    run(main())


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"refusal": "no"},
        {"content": "a"},
    ],
)
def test_the_first_token_may_be_of_any_kind(delta: dict[str, Any]) -> None:
    """Models think, or call tools, before they say anything."""
    go = asyncio.Event()

    async def script(call: Call) -> None:
        await call.sse_head()
        await call.chunk(b'data: {"choices":[{"index":0,"delta":{"role":"assistant"}}]}\n\n')
        choice = {"index": 0, "delta": delta, "finish_reason": None}
        await call.chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await go.wait()
        await call.chunk(frame(finish="stop") + usage_frame() + DONE)
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            task = asyncio.create_task(f.post(chat()))
            await until(lambda: any(x.first_token_s for x in f.gateway.driver.flights.values()))
            go.set()
            assert (await task).status == 200
            f.assert_idle()

    run(main())


def test_the_gateway_never_half_closes() -> None:
    """vLLM takes a half-closed request for a client that left, and answers nothing."""

    async def main() -> None:
        eof = asyncio.Event()

        async def script(call: Call) -> None:
            reading = asyncio.create_task(call._reader.read(1))
            done, _ = await asyncio.wait((reading,), timeout=0.2)
            if done:
                eof.set()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await answer(call)

        async with FakeUpstream(script) as upstream, front(upstream) as f:
            for stream in (True, False):
                assert (await f.post(chat(stream=stream))).status == 200
            assert not eof.is_set()
            assert upstream.connections <= 3, "probes and requests go over kept connections"

    run(main())


@pytest.mark.parametrize("close", [True, False])
def test_connections_after_an_error(close: bool) -> None:
    """vLLM keeps the connection after a 400, llama.cpp closes it: neither costs the next request anything."""

    async def main() -> None:
        ports: list[Any] = []

        async def script(call: Call) -> None:
            ports.append(call._writer.get_extra_info("peername"))
            if len(ports) % 2:
                extra = b"connection: close\r\n" if close else b""
                await call.reply(400, b'{"error":{"message":"no"}}', extra=extra)
                if close:
                    call.close()
            else:
                await call.reply(200, whole())

        async with FakeUpstream(script) as upstream, front(upstream) as f:
            for _ in range(3):
                assert (await f.post(chat(stream=False))).status == 400
                assert (await f.post(chat(stream=False))).status == 200
            assert (ports[0] == ports[1]) is not close
            assert len(upstream.calls) == 6
            f.assert_idle()

    run(main())


def test_an_engine_that_answers_to_any_model_name_is_asked_for_its_own_only() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, instance_fields={"kind": "llamacpp"}) as f:
            reply = await f.post(chat(model="somebody-elses"))
            assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")
            assert upstream.calls == []

    run(main())


def test_an_engine_whose_model_list_is_broken_serves_the_configured_models() -> None:
    """`transformers serve` answers 500 to /v1/models, and refuses every name but the path it was started with."""

    async def script(call: Call) -> None:
        if call.request_line.startswith("GET /health"):
            await call.reply(200, b'{"status":"ok"}')
        elif call.request_line.startswith("GET"):
            await call.reply(500, b"Internal Server Error", "text/plain")
        else:
            await answer(call)

    async def main() -> None:
        async with FakeUpstream(script, health=0) as upstream:
            odd = instance(upstream, "odd", kind="transformers", models=("m",), aliases={"m": "/models/smol"})
            async with front(instances=(odd,)) as f:
                assert [row["id"] for row in (await f.get("/v1/models")).json()["data"]] == ["m"]
                body = chat(stream=False)
                assert (await f.post(body)).status == 200
                sent = [c.body for c in upstream.calls if c.request_line.startswith("POST")]
                assert sent == [body.replace(b'"model": "m"', b'"model": "/models/smol"')], "and nothing private"

    run(main())


PRIVATE = ("priority", "cache_salt", "kv_transfer_params", "bootstrap_room", "stream_options", "return_token_ids")


@pytest.mark.parametrize("kind", ["transformers", "tgi", "llamacpp", "openai", "vllm", "sglang", "embedded"])
def test_what_each_kind_is_sent_besides_the_clients_fields(kind: str) -> None:
    allowed = {
        "transformers": set[str](),
        "vllm": {"stream_options", "cache_salt"},
        "embedded": {"stream_options", "cache_salt", "priority"},
    }.get(kind, {"stream_options"})

    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, instance_fields={"kind": kind}) as f:
            f.gateway.surface.salts = Salts(b"k" * 32)
            for stream in (True, False):
                reply = await f.post(chat(stream=stream), x_weighbridge_tier="interactive")
                assert reply.status == 200
                sent = set(json.loads(upstream.calls[-1].body)) - set(json.loads(chat(stream=stream)))
                assert sent <= allowed
                assert not sent - set(PRIVATE)

    run(main())
