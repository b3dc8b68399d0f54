"""Whole replies put together from streams, where an engine stops for a client that left only in a stream."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import DONE, ROLE, chat, frame, front, usage_frame
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.gateway.assemble import Assembler
from weighbridge.routing.router import RouterSettings

LLAMA = Path(__file__).resolve().parents[1] / "data" / "engines" / "llamacpp"
KIND = {"kind": "llamacpp"}


def assembled(body: bytes, size: int = 7) -> Any:
    assembler = Assembler()
    for start in range(0, len(body), size):
        assembler.feed(body[start : start + size])
    assert assembler.complete
    return json.loads(assembler.body())


@pytest.mark.parametrize(("stream", "whole"), [("stream_chat_usage", "chat_basic"), ("stream_comp_v1", "comp_v1")])
def test_a_recorded_stream_gives_what_the_recorded_whole_reply_has(stream: str, whole: str) -> None:
    made = assembled((LLAMA / f"{stream}.sse").read_bytes())
    own = json.loads((LLAMA / f"{whole}.json").read_text())["json"]
    assert made.keys() == own.keys()
    assert made["object"] == own["object"]
    (choice,), (own_choice,) = made["choices"], own["choices"]
    assert choice.keys() == own_choice.keys()
    if "message" in choice:
        assert choice["message"]["role"] == "assistant"
        assert own_choice["message"]["content"].startswith(choice["message"]["content"])
    else:
        assert choice["text"] == own_choice["text"]
    assert made["usage"].keys() == own["usage"].keys()
    assert made["timings"].keys() == own["timings"].keys()


def test_tool_calls_logprobs_choices_and_unknown_keys() -> None:
    def piece(index: int = 0, finish: str | None = None, logprobs: Any = None, **delta: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return (
            b"data: "
            + json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [choice]}).encode()
            + b"\n\n"
        )

    def call(index: int, **function: str) -> dict[str, Any]:
        more = {"id": f"call-{index}", "type": "function"} if "name" in function else {}
        return {"index": index, **more, "function": function}

    frames = (
        piece(role="assistant", content=None),
        piece(tool_calls=[call(0, name="weather", arguments="")]),
        piece(tool_calls=[call(0, arguments='{"city":')]),
        piece(tool_calls=[call(1, name="time", arguments="{}")]),
        piece(tool_calls=[call(0, arguments='"Oslo"}')]),
        piece(1, content="Hé", logprobs={"content": [{"token": "H"}]}),
        piece(1, content="llo", reasoning_content="so", logprobs={"content": [{"token": "e"}]}),
        piece(0, finish="tool_calls"),
        piece(1, finish="stop"),
        b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":1},"timings":{"n":1e-7},"made_up":[1]}\n\n',
        DONE,
    )
    made = assembled(b"".join(frames), 11)
    first, second = made["choices"]
    assert first["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call-0", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
            {"id": "call-1", "type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert (second["message"]["content"], second["message"]["reasoning_content"]) == ("Héllo", "so")
    assert second["logprobs"] == {"content": [{"token": "H"}, {"token": "e"}]}
    assert (made["object"], made["made_up"], made["timings"]) == ("chat.completion", [1], {"n": 1e-7})


async def answer(call: Call) -> None:
    assert json.loads(call.body)["stream"] is True
    await call.sse_head()
    for data in (ROLE, frame("a"), frame("b"), frame(finish="stop"), usage_frame(), DONE):
        await call.chunk(data)
    await call.last_chunk()


def test_a_whole_reply_is_asked_for_as_a_stream() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, instance_fields=KIND) as f:
            body = json.loads(chat(stream=False))
            for variant in ({**body}, {k: v for k, v in body.items() if k != "stream"}):
                reply = await f.post(json.dumps(variant).encode())
                assert reply.status == 200
                assert reply.header(b"content-type") == b"application/json"
                value = reply.json()
                assert value["choices"] == [
                    {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ab"}}
                ]
                assert value["usage"]["completion_tokens"] == 3
                sent = json.loads(upstream.calls[-1].body)
                assert sent.pop("stream_options") == {"include_usage": True}
                assert sent == {**body, "stream": True}
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.ttft_s is not None, "and tells when its first token came"
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", ["cut", "reset", "error", "nonsense", "unfinished"])
def test_a_stream_that_breaks_is_tried_elsewhere_unseen(how: str) -> None:
    async def breaks(call: Call) -> None:
        await call.sse_head()
        await call.chunk(ROLE + frame("a"))
        if how == "cut":
            call.close()
        elif how == "reset":
            call.reset()
        elif how == "error":
            await call.chunk(b'data: {"error":{"message":"out of memory"}}\n\n')
            await call.last_chunk()
        elif how == "nonsense":
            await call.chunk(b"data: {]\n\n")
            await call.wait_closed()
        else:
            await call.last_chunk()

    async def main() -> None:
        async with (
            FakeUpstream(breaks) as a,
            FakeUpstream(answer) as b,
            front(a, b, instance_fields=KIND, router=RouterSettings(policy="round_robin")) as f,
        ):
            for _ in range(2):
                reply = await f.post(chat(stream=False))
                assert reply.status == 200
                assert reply.json()["choices"][0]["message"]["content"] == "ab"
            assert len(a.calls) >= 1
            f.assert_idle()

    run(main())


def test_errors_and_disconnects_are_those_of_the_engine_and_the_client() -> None:
    async def main() -> None:
        refuse = asyncio.Event()

        async def script(call: Call) -> None:
            if not refuse.is_set():
                await call.reply(400, b'{"error":{"message":"too long"}}')
                return
            await call.sse_head()
            await call.chunk(ROLE + frame("a"))
            await call.wait_closed()

        async with FakeUpstream(script) as upstream, front(upstream, instance_fields=KIND) as f:
            reply = await f.post(chat(stream=False))
            assert (reply.status, reply.json()["error"]["message"]) == (400, "too long")
            refuse.set()
            task = asyncio.create_task(f.post(chat(stream=False)))
            await until(lambda: any(x.first_token_s for x in f.gateway.driver.flights.values()))
            task.cancel()
            await until(lambda: upstream.calls[-1].peer_closed_s is not None, 1.0)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()

    run(main())


def test_an_endless_reply_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge.gateway.assemble.MAX_BYTES", 2000)

    async def script(call: Call) -> None:
        await call.sse_head()
        for _ in range(100):
            await call.chunk(frame("aaaaaaaaaa"))
        await call.wait_closed()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields=KIND) as f:
            assert (await f.post(chat(stream=False))).status == 502
            f.assert_idle()

    run(main())
