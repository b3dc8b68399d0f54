"""Disaggregated requests: the two-step KV transfer, the bootstrap pair, and what happens when a leg fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import answer, chat, text_of
from tests.support.loop import run, until
from tests.support.pairs import PARAMS, pair, prefill
from tests.support.upstream import Call
from weighbridge.core.event_log import LogReader
from weighbridge.core.events import RequestFailed
from weighbridge.routing.router import RouterSettings


@pytest.mark.parametrize("stream", [True, False])
def test_two_steps(stream: bool) -> None:
    async def main() -> None:
        async with pair(prefill, answer) as (f, p, d):
            body = chat(
                stream=stream,
                min_tokens=5,
                max_completion_tokens=7,
                **({"stream_options": {"include_usage": True}} if stream else {}),
            )
            reply = await f.post(body, x_request_id="join-me")
            assert reply.status == 200
            if stream:
                assert text_of(reply.body) == "abc"
            first, second = p.calls[0], d.calls[0]
            sent = json.loads(first.body)
            assert (sent["stream"], sent["max_tokens"], sent["max_completion_tokens"]) == (False, 1, 1)
            assert "stream_options" not in sent
            assert "min_tokens" not in sent
            assert sent["kv_transfer_params"] == {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
            }
            assert second.body.replace(b'"kv_transfer_params":' + PARAMS + b",", b"") == body, "verbatim, nothing else"
            assert first.headers["x-request-id"] == second.headers["x-request-id"] == "join-me"
            f.assert_idle()

    run(main())


def test_an_engine_that_gives_no_parameters_means_a_plain_decode() -> None:
    async def main() -> None:
        async with pair(answer, answer) as (f, _, d):
            assert (await f.post(chat(stream=False))).status == 200
            assert "kv_transfer_params" not in json.loads(d.calls[0].body)
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", ["status", "reset", "silent"])
def test_a_failed_decode_leg_redoes_the_prefill(how: str) -> None:
    async def decode(call: Call) -> None:
        if how == "status":
            await call.reply(500, b'{"error":{"message":"Internal server error"}}')
        elif how == "reset":
            call.reset()
        else:
            await call.sse_head()
            call.close()

    async def main() -> None:
        async with pair(prefill, decode) as (f, p, d):
            reply = await f.post(chat())
            assert reply.status == 502
            assert len(d.calls) == 3
            assert len(p.calls) == 2, "parameters are good for one use: each pair prefills anew"
            assert "kv_transfer_params" not in json.loads(d.calls[2].body), "the last try needs no prefill engine"
            f.assert_idle()

    run(main())


def test_a_decode_leg_is_not_sent_again_over_a_new_connection() -> None:
    """A plain request is, where the connection that was kept alive dies at once; but parameters are good for one use,
    and the engine may have used them."""

    async def main() -> None:
        broken = False

        async def decode(call: Call) -> None:
            nonlocal broken
            if len(d.calls) > 1 and not broken:
                broken = True
                call.reset()
            else:
                await answer(call)

        async with pair(prefill, decode) as (f, p, d):
            for _ in range(2):
                assert text_of((await f.post(chat())).body) == "abc"
            assert broken
            assert len(d.calls) == 3
            assert len(p.calls) == 3, "each pair prefills anew"
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", ["status", "reset"])
def test_a_failed_prefill_leg_is_retried_and_nobody_waits_for_its_kv(how: str) -> None:
    async def main() -> None:
        tries = 0

        async def sometimes(call: Call) -> None:
            nonlocal tries
            tries += 1
            if tries < 2:
                if how == "status":
                    await call.reply(500, b"{}")
                else:
                    call.reset()
            else:
                await prefill(call)

        async with pair(sometimes, answer) as (f, p, d):
            reply = await f.post(chat())
            assert reply.status == 200
            assert (len(p.calls), len(d.calls)) == (2, 1)
            assert "kv_transfer_params" in json.loads(d.calls[0].body)
            f.assert_idle()

    run(main())


def test_a_request_the_prefill_engine_refuses_is_the_clients_fault() -> None:
    async def refuse(call: Call) -> None:
        await call.reply(400, b'{"error":{"message":"too long"}}')

    async def main() -> None:
        async with pair(refuse, answer) as (f, p, d):
            assert (await f.post(chat())).status == 400
            assert (len(p.calls), len(d.calls)) == (1, 0)
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_disconnect_ends_either_leg(leg: str) -> None:
    async def main() -> None:
        reached = asyncio.Event()

        async def stuck(call: Call) -> None:
            reached.set()
            await call.wait_closed()

        scripts = (stuck, answer) if leg == "prefill" else (prefill, stuck)
        async with pair(*scripts) as (f, p, d):
            task = asyncio.create_task(f.post(chat()))
            await reached.wait()
            task.cancel()
            upstream = p if leg == "prefill" else d
            await until(lambda: upstream.calls[0].peer_closed_s is not None, 1.0)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()

    run(main())


def test_late_parameters_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge.gateway.legs.LEASE_S", -1.0)

    async def main() -> None:
        async with pair(prefill, answer, data_dir=str(tmp_path)) as (f, _, d):
            reply = await f.post(chat())
            assert text_of(reply.body) == "abc"
            assert len(d.calls) == 1
            assert "kv_transfer_params" not in json.loads(d.calls[0].body), "what may have been freed is never read"
            f.assert_idle()
            f.gateway.writer.sync()
        (log,) = tmp_path.glob("events-*.jsonl")
        with log.open("rb") as stream:
            failed = [e.e for e in LogReader(stream) if isinstance(e.e, RequestFailed)]
        assert {(e.instance, e.reason) for e in failed} == {("p0", "prefill_lease_over")}, (
            "not the decode engine's fault"
        )

    run(main())


def test_bootstrap_pairs_are_sent_at_once_with_one_room() -> None:
    async def main() -> None:
        prefilled = asyncio.Semaphore(0)

        async def first(call: Call) -> None:
            prefilled.release()
            await call.reply(200, b"{}")

        async def second(call: Call) -> None:
            await prefilled.acquire()  # as a decode engine waits for its KV
            await answer(call)

        settings = RouterSettings(policy="least_requests", binding="early")
        async with pair(first, second, kind="sglang", router=settings) as (f, p, d):
            reply = await f.post(chat())
            assert text_of(reply.body) == "abc"
            one, two = json.loads(p.calls[0].body), json.loads(d.calls[0].body)
            for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room"):
                assert one[name] == two[name]
            assert (one["bootstrap_host"], one["bootstrap_port"]) == ("127.0.0.1", 8998)
            assert 0 <= one["bootstrap_room"] < 2**63
            await f.post(chat())
            assert json.loads(p.calls[1].body)["bootstrap_room"] != one["bootstrap_room"]
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("how", ["status", "reset"])
def test_a_bootstrap_pair_whose_prefill_fails_lets_the_decode_leg_go(how: str) -> None:
    async def main() -> None:
        async def broken(call: Call) -> None:
            await asyncio.sleep(0.05)
            if how == "status":
                await call.reply(500, b"{}")
            else:
                call.reset()

        async def waits(call: Call) -> None:
            await call.wait_closed()

        settings = RouterSettings(policy="least_requests", binding="early")
        async with pair(broken, waits, kind="sglang", router=settings) as (f, _, d):
            reply = await f.post(chat())
            assert reply.status == 502
            await until(lambda: all(c.peer_closed_s is not None for c in d.calls), 1.0)
            assert len(d.calls) == 3
            f.assert_idle()

    run(main())


def test_clients_cannot_name_addresses_to_the_engines() -> None:
    async def main() -> None:
        async with pair(prefill, answer) as (f, p, d):
            for name in ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"):
                reply = await f.post(chat(**{name: {"remote_host": "10.0.0.1"}}))
                assert (reply.status, reply.json()["error"]["param"]) == (400, name)
            assert p.calls == d.calls == []

    run(main())


EARLY = RouterSettings(policy="least_requests", binding="early")


@pytest.mark.parametrize("stream", [True, False])
def test_a_two_step_pair_chosen_together_is_still_run_one_after_the_other(stream: bool) -> None:
    async def main() -> None:
        async with pair(prefill, answer, router=EARLY) as (f, p, d):
            reply = await f.post(chat(stream=stream))
            assert reply.status == 200
            assert json.loads(p.calls[0].body)["kv_transfer_params"]["do_remote_decode"] is True
            assert b'"kv_transfer_params":' + PARAMS in d.calls[0].body
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["status", "reset"])
def test_a_two_step_pair_chosen_together_starts_again_when_a_leg_fails(leg: str, how: str) -> None:
    async def broken(call: Call) -> None:
        if how == "status":
            await call.reply(500, b"{}")
        else:
            call.reset()

    async def main() -> None:
        scripts = (broken, answer) if leg == "prefill" else (prefill, broken)
        async with pair(*scripts, router=EARLY) as (f, p, d):
            assert (await f.post(chat())).status == (200 if leg == "prefill" else 502)
            assert len(p.calls) == 2
            assert len(d.calls) == (1 if leg == "prefill" else 3)
            f.assert_idle()

    run(main())


def recorded(name: str) -> Any:
    path = Path(__file__).resolve().parents[1] / "data" / "engines" / "vllm" / "pd_nixl" / f"{name}.json"
    return json.loads(path.read_text())


def test_the_recorded_exchange_of_two_vllm_processes() -> None:
    """What the engines were sent and said, byte for byte where it matters."""
    first, second = recorded("prefill_leg0"), recorded("decode_leg0")

    async def prefill_engine(call: Call) -> None:
        await call.reply(200, json.dumps(first["json"]).encode())

    async def decode_engine(call: Call) -> None:
        await call.reply(200, json.dumps(second["json"]).encode())

    async def main() -> None:
        async with pair(prefill_engine, decode_engine) as (f, p, d):
            body = {k: v for k, v in second["request"]["body"].items() if k != "kv_transfer_params"}
            reply = await f.post(json.dumps({**body, "model": "m"}).encode(), "/v1/completions")
            assert reply.json() == second["json"]
            sent = json.loads(p.calls[0].body)
            asked = first["request"]["body"]
            assert sent["kv_transfer_params"] == asked["kv_transfer_params"]
            assert (sent["max_tokens"], sent.get("stream", False)) == (asked["max_tokens"], asked.get("stream", False))
            assert json.loads(d.calls[0].body)["kv_transfer_params"] == first["json"]["kv_transfer_params"]
            f.assert_idle()

    run(main())


@pytest.mark.parametrize("name", ["decode_dead_remote", "decode_dead_remote_recompute", "decode_no_params"])
def test_the_recorded_answers_of_a_decode_engine_that_gets_no_kv(name: str) -> None:
    record = recorded(name)

    async def decode_engine(call: Call) -> None:
        await call.reply(record["status"], json.dumps(record["json"]).encode())

    async def main() -> None:
        async with pair(prefill, decode_engine) as (f, p, d):
            body = json.dumps({"model": "m", "prompt": "The capital", "max_tokens": 5}).encode()
            reply = await f.post(body, "/v1/completions")
            if record["status"] == 200:
                assert reply.json() == record["json"]
            else:
                assert reply.status == 502
                assert (len(p.calls), len(d.calls)) == (2, 3), "a failed load is never retried with the same parameters"
                assert b"kv_transfer_params" not in d.calls[2].body, "nor for ever: the last try loads nothing"
            f.assert_idle()

    run(main())


def test_a_streamed_prefill_reply_has_no_parameters_and_means_a_plain_decode() -> None:
    """Recorded: an engine that streams the prefill leg all the same tells no parameters; the KV cannot be used."""
    path = Path(__file__).resolve().parents[1] / "data" / "engines" / "vllm" / "pd_nixl" / "prefill_streamed.sse"
    assert b"kv_transfer_params" not in path.read_bytes()

    async def main() -> None:
        async with pair(prefill, answer) as (f, p, _):
            await f.post(chat(stream=True))
            assert json.loads(p.calls[0].body)["stream"] is False

    run(main())


def test_without_any_prefill_engine_a_decode_engine_computes_the_prompt_itself() -> None:
    async def main() -> None:
        async with pair(prefill, answer) as (f, p, d):
            f.gateway.health.drain(f.gateway.driver.endpoints["p0"])
            reply = await f.post(chat())
            assert text_of(reply.body) == "abc"
            assert p.calls == []
            assert "kv_transfer_params" not in json.loads(d.calls[0].body)
            f.assert_idle()
        async with pair(prefill, answer, kind="sglang") as (f, p, d):
            f.gateway.health.drain(f.gateway.driver.endpoints["p0"])
            assert (await f.post(chat())).status == 503
            assert d.calls == [], "its decode instances wait for a bootstrap that nobody sends"
            f.assert_idle()

    run(main())
