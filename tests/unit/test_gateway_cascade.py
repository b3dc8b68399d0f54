"""Cascades through the gateway: which answers reach the client, what the record says, and that everything ends once."""

import asyncio
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import DONE, ROLE, answer, chat, frame, front, instance, text_of, usage_frame, whole
from tests.support.loop import run
from tests.support.upstream import Call, FakeUpstream
from tests.unit.test_gateway_model_choice import KEY, selection
from weighbridge.gateway.answer import Unreadable, streamed_answer, whole_answer
from weighbridge.gateway.held_reply import MAX_HELD_BYTES
from weighbridge.gateway.settings import KeySettings
from weighbridge.selection.cascade import CascadeSettings, Verifier

NUMBER = Verifier(pattern=r"\d")


def says(content: Sequence[str], prompt: int = 10, output: int = 5) -> Any:
    """An engine that answers this, whole or as a stream of its characters (of its items, if it is a list)."""

    async def script(call: Call) -> None:
        if not json.loads(call.body).get("stream"):
            await call.reply(200, whole("".join(content), prompt, output))
            return
        await call.sse_head()
        for data in (ROLE, *(frame(c) for c in content), frame(finish="stop"), usage_frame(prompt, output), DONE):
            await call.chunk(data)
        await call.last_chunk()

    return script


def cascading(folder: Path, big: FakeUpstream, small: FakeUpstream, verifier: Verifier = NUMBER, **fields: Any) -> Any:
    settings = selection(folder, cascade=CascadeSettings(models=("small", "big"), verifier=verifier))
    instances = (instance(big, "i-big", models=("big",)), instance(small, "i-small", models=("small",)))
    return front(instances=instances, selection=settings, **fields)


def ask(stream: bool = False, **fields: Any) -> bytes:
    return chat(stream, model="cascade", **fields)


async def record(f: Any) -> Any:
    return json.loads((await f.get("/selections", admin=True)).body)["selections"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_a_good_answer_of_the_cheap_model_is_the_answer(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        async with (
            FakeUpstream(says("no")) as big,
            FakeUpstream(says("it is 42")) as small,
            cascading(tmp_path, big, small) as f,
        ):
            reply = await f.post(ask(stream), x_request_id="r", x_weighbridge_explain="1")
            assert reply.status == 200
            text = text_of(reply.body) if stream else json.loads(reply.body)["choices"][0]["message"]["content"]
            assert text == "it is 42"
            assert stream is False or reply.body.endswith(DONE)
            names = ("x-request-id", "x-weighbridge-model", "x-weighbridge-attempts")
            assert [reply.header(n.encode()) for n in names] == [b"r", b"small", b"1"]
            cost = 10 * 0.1e-6 + 5 * 0.2e-6
            assert float(reply.header(b"x-weighbridge-cost-usd")) == pytest.approx(cost)
            (only,) = json.loads(reply.header(b"x-weighbridge-cascade"))["tries"]
            assert (only["model"], only["instance"], only["passed"]) == ("small", "i-small", True)
            assert big.calls == []
            kept = await record(f)
            assert (kept["request_id"], kept["decision"]["model"]) == ("r", "small")
            assert kept["cascade"]["cost_usd"] == pytest.approx(cost)
            assert "cascade" in {row["id"] for row in json.loads((await f.get("/v1/models")).body)["data"]}
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_answer_is_never_seen_and_the_next_model_passes_as_it_comes(tmp_path: Path, stream: bool) -> None:
    async def main() -> None:
        async with (
            FakeUpstream(says("whatever", 20, 7)) as big,
            FakeUpstream(says("no idea")) as small,
            cascading(tmp_path, big, small) as f,
        ):
            reply = await f.post(ask(stream), x_request_id="r")
            text = text_of(reply.body) if stream else json.loads(reply.body)["choices"][0]["message"]["content"]
            assert text == "whatever"
            names = ("x-request-id", "x-weighbridge-model", "x-weighbridge-attempts")
            assert [reply.header(n.encode()) for n in names] == [b"r", b"big", b"2"]
            kept = await record(f)
            first, second = kept["cascade"]["tries"]
            assert first["reason"] == "the pattern was not found"
            assert (second["model"], second["verified"], second["request_id"]) == ("big", False, "r.2")
            spent = 10 * 0.1e-6 + 5 * 0.2e-6 + 20 * 5e-6 + 7 * 50e-6
            assert kept["cascade"]["cost_usd"] == pytest.approx(spent)
            assert kept["decision"]["reason"] == "cascade: big after 2 calls"
            said = await f.post(b'{"request_id":"r","score":1}', "/v1/feedback")
            assert json.loads(said.body)["model"] == "big"
            f.assert_idle()

    run(main())


def test_engines_that_fail_stall_or_talk_nonsense_are_a_reason_to_climb(tmp_path: Path) -> None:
    async def error(call: Call) -> None:
        await call.reply(500, b'{"error":{"message":"x"}}')

    async def garbage(call: Call) -> None:
        await call.reply(200, b"42")

    async def cut(call: Call) -> None:
        await call.sse_head()
        await call.chunk(frame("4"))
        call.close()

    async def error_frame(call: Call) -> None:
        await call.sse_head()
        await call.chunk(b'data: {"error": {"message": "42"}}\n\n')
        await call.last_chunk()

    async def main() -> None:
        for script, stream in ((error, False), (garbage, False), (cut, True), (error_frame, True)):
            async with (
                FakeUpstream(says("7")) as big,
                FakeUpstream(script) as small,
                cascading(tmp_path, big, small) as f,
            ):
                reply = await f.post(ask(stream))
                assert (reply.status, reply.header(b"x-weighbridge-model")) == (200, b"big"), script
                assert b"42" not in reply.body
                f.assert_idle()

    run(main())


def test_a_judge_grades_and_its_call_is_counted(tmp_path: Path) -> None:
    grades = iter(("9", "Grade: 3", "none"))

    async def judge(call: Call) -> None:
        body = json.loads(call.body)
        if body["max_tokens"] == 16:  # the judge's call: the question and the answer are in it
            assert "hi" in body["messages"][0]["content"] and "perhaps" in body["messages"][0]["content"]
            await call.reply(200, whole(next(grades), 100, 1))
        else:
            await says("certainly", 20, 7)(call)

    async def main() -> None:
        verifier = Verifier(judge="big", min_grade=7)
        async with (
            FakeUpstream(judge) as big,
            FakeUpstream(says("perhaps")) as small,
            cascading(tmp_path, big, small, verifier) as f,
        ):
            good = await f.post(ask())
            assert good.header(b"x-weighbridge-model") == b"small"
            kept = await record(f)
            tried, graded = kept["cascade"]["tries"]
            assert (tried["passed"], graded["judge"], graded["model"]) == (True, True, "big")
            assert kept["cascade"]["cost_usd"] == pytest.approx(10 * 0.1e-6 + 5 * 0.2e-6 + 100 * 5e-6 + 50e-6)
            for reason in ("graded 3", "the judge gave no number"):
                bad = await f.post(ask(stream=True))
                assert text_of(bad.body) == "certainly"
                assert bad.header(b"x-weighbridge-attempts") == b"2"
                assert (await record(f))["cascade"]["tries"][0]["reason"] == reason
            f.assert_idle()

    run(main())


def test_json_schema_tool_calls_and_endpoints(tmp_path: Path) -> None:
    tool = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}}

    async def main() -> None:
        schema = Verifier(json_schema={"type": "object", "required": ["a"]})
        answers = iter((whole('{"a": 1}'), whole('{"b": 1}'), json.dumps({"choices": [tool]}).encode()))

        async def script(call: Call) -> None:
            await call.reply(200, next(answers))

        async with (
            FakeUpstream(answer) as big,
            FakeUpstream(script) as small,
            cascading(tmp_path, big, small, schema) as f,
        ):
            models = [(await f.post(ask())).header(b"x-weighbridge-model") for _ in range(3)]
            assert models == [b"small", b"big", b"small"]
            refused = await f.post(b'{"model":"cascade","input":"x"}', "/v1/embeddings")
            assert (refused.status, json.loads(refused.body)["error"]["code"]) == (400, "unsupported_endpoint")
            f.assert_idle()

    run(main())


def test_a_client_that_leaves_cancels_what_runs(tmp_path: Path) -> None:
    reached = asyncio.Event()
    gone: list[float] = []

    async def waits(call: Call) -> None:
        reached.set()
        gone.append(await call.wait_closed())

    async def main() -> None:
        async with FakeUpstream(answer) as big, FakeUpstream(waits) as small, cascading(tmp_path, big, small) as f:
            asking = asyncio.ensure_future(f.post(ask(stream=True)))
            await reached.wait()
            asking.cancel()
            while not gone:
                await asyncio.sleep(0.01)
            assert big.calls == []
            assert (await record(f))["cascade"]["tries"][0]["reason"] == "the client left"
            f.assert_idle()

    run(main())


def test_a_model_that_is_down_is_passed_over_and_all_down_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        settings = selection(tmp_path, cascade=CascadeSettings(models=("small", "big"), verifier=NUMBER))
        async with FakeUpstream(answer) as big:
            async with front(instances=(instance(big, "i", models=("big",)),), selection=settings) as f:
                reply = await f.post(ask(stream=True))
                assert (text_of(reply.body), reply.header(b"x-weighbridge-attempts")) == ("abc", b"1")
            async with front(instances=(instance(big, "i", models=("other",)),), selection=settings) as f:
                assert (await f.post(ask())).status == 503
                f.assert_idle()

    run(main())


def test_an_answer_too_long_to_hold_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            FakeUpstream(says("1")) as big,
            FakeUpstream(says(["4" * (1 << 18)] * (MAX_HELD_BYTES >> 18))) as small,
            cascading(tmp_path, big, small) as f,
        ):
            assert text_of((await f.post(ask(stream=True))).body) == "1"
            assert "longer than" in (await record(f))["cascade"]["tries"][0]["reason"]
            f.assert_idle()

    run(main())


def test_a_key_whose_tokens_are_spent_between_two_tries_is_told_so(tmp_path: Path) -> None:
    async def main() -> None:
        key = KeySettings(sha256=hashlib.sha256(KEY.encode()).hexdigest(), tenant="t", tokens_per_minute=30)
        async with (
            FakeUpstream(says("1")) as big,
            FakeUpstream(says("none")) as small,
            cascading(tmp_path, big, small, keys=(key,)) as f,
        ):
            reply = await f.post(ask(max_tokens=8), authorization=f"Bearer {KEY}", x_request_id="r")
            assert (reply.status, reply.header(b"x-request-id"), big.calls) == (429, b"r", [])
            f.assert_idle()

    run(main())


def test_whatever_engines_and_clients_do_every_request_ends_once_and_no_unchecked_answer_is_seen(
    tmp_path: Path,
) -> None:
    rng = random.Random(11)

    async def erratic(call: Call) -> None:
        kind = rng.randrange(6)
        if kind == 0:
            await call.reply(rng.choice((400, 429, 500, 503)), b'{"error":{"message":"small says no"}}')
        elif kind == 1:
            await call.sse_head()
            await call.chunk(frame("1 small"))
            call.close()
        elif kind == 2:
            await asyncio.sleep(0.2)
            await says("2 small")(call)
        else:
            await says(rng.choice(("3 small", "small without")))(call)

    async def main() -> None:
        async with (
            FakeUpstream(says("big")) as big,
            FakeUpstream(erratic) as small,
            cascading(tmp_path, big, small) as f,
        ):

            async def one(number: int) -> str:
                asking = asyncio.ensure_future(f.post(ask(stream := number % 2 == 0), x_request_id=f"r{number}"))
                if number % 7 == 0:
                    await asyncio.sleep(0.05)
                    asking.cancel()
                    return "left"
                reply = await asking
                assert reply.header(b"x-request-id") == f"r{number}".encode()
                if reply.status != 200:
                    return "refused"
                text = text_of(reply.body) if stream else json.loads(reply.body)["choices"][0]["message"]["content"]
                assert text == "big" or ("small" in text and text[0].isdigit()), text
                return text

            seen = await asyncio.gather(*(one(n) for n in range(120)), return_exceptions=True)
            wrong = [s for s in seen if isinstance(s, BaseException) and not isinstance(s, asyncio.CancelledError)]
            assert wrong == []
            assert {"big", "2 small", "3 small"} <= set(map(str, seen))
            while f.gateway.driver.flights:
                await asyncio.sleep(0.01)
            f.assert_idle()
            kept = json.loads((await f.get("/selections?last=500", admin=True)).body)["selections"]
            assert sorted(row["request_id"] for row in kept) == sorted(f"r{n}" for n in range(120))

    run(main())


def test_texts_of_replies() -> None:
    parts = {"index": 0, "message": {"content": [{"type": "text", "text": "a"}, {"type": "image"}]}}
    assert whole_answer(json.dumps({"choices": [parts, {"index": 1, "text": "b"}]}).encode()).texts == ("a", "b")
    stream = b"".join(
        b"data: " + json.dumps({"choices": [{"index": i, "text": t}]}).encode() + b"\n\n"
        for i, t in ((1, "y"), (0, "x"))
    )
    assert streamed_answer(stream + DONE).texts == ("x", "y")
    for body in (b"{}", b"x", b'{"error": "e"}'):
        with pytest.raises(Unreadable):
            whole_answer(body)
