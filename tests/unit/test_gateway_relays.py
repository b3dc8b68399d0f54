"""A relay and the Router's process as two objects of one test: what each does when the other is late, odd or gone."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path

import msgspec
import pytest

from tests.support import failing_policy
from tests.support.gateway import MODEL, answer, chat, instance, text_of
from tests.support.loop import until
from tests.support.relays import KEYS, Gate, RunLog, pair
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.errors import ConfigError
from weighbridge.core.request import Tier
from weighbridge.gateway import Gateway, GatewaySettings, KeySettings
from weighbridge.gateway.relays.wire import Stop
from weighbridge.routing.router import RouterSettings
from weighbridge.selection.settings import SelectionSettings


def test_without_a_router_requests_wait_and_then_are_refused_with_a_time_to_return(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream) as both:
            (relay,) = both.relays
            assert (await both.post()).status == 200
            await until(lambda: not relay.desk.flights)
            await both.die()
            waiting = [asyncio.create_task(both.post()) for _ in range(3)]
            await until(lambda: len(relay.desk.flights) == 3)
            relay.desk.give_up()  # what the timer does when `router_wait_s` is over
            for reply in [*await asyncio.gather(*waiting), await both.post()]:
                assert reply.status == 503
                assert reply.json()["error"]["code"] == "no_capacity"
                assert int(reply.header(b"retry-after")) >= 1
                assert reply.header(b"x-weighbridge-reason") == b"no_router"
            assert len(upstream.calls) == 1
            router = await both.open_router()
            await until(lambda: relay.desk.connected)
            assert (await both.post()).status == 200
            await until(lambda: not router.driver.flights)
            both.assert_idle()

    asyncio.run(run())


def test_the_bound_on_waiting_holds_by_the_clock(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream, router_wait_s=2.0) as both:
            await both.die()
            begun = time.monotonic()
            assert (await both.post()).status == 503
            assert 1.5 < time.monotonic() - begun < 4.0

    asyncio.run(run())


def test_a_new_router_charges_what_runs_and_ends_it_once(tmp_path: Path) -> None:
    async def run() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as upstream, pair(tmp_path, upstream) as both:
            (relay,) = both.relays
            running = [asyncio.create_task(both.post()) for _ in range(3)]
            await until(lambda: sum(f.first_token_s is not None for f in relay.desk.flights.values()) == 3)
            await both.die()
            router = await both.open_router()
            await until(lambda: router.driver.router.live_requests == 3)
            ledger = router.driver.router.fleet.instances["i0"]
            assert (ledger.in_flight, ledger.decoding, ledger.prefill_tokens) == (3, 3, 0)
            assert router.driver.endpoints["i0"].running == 3
            gate.open.set()
            for reply in await asyncio.gather(*running):
                assert text_of(reply.body) == "abc"
            await until(lambda: not router.driver.flights)
            both.assert_idle()
            await until(lambda: router.stats.requests.get(("chat", "m", "i0", "ok")) == 3.0)

    asyncio.run(run())


def test_a_client_that_leaves_without_a_router_frees_its_engine_and_is_told_to_the_next_one(tmp_path: Path) -> None:
    async def run() -> None:
        gate = Gate()
        log = RunLog(tmp_path / "log")
        async with FakeUpstream(gate) as upstream, pair(tmp_path, upstream) as both:
            (relay,) = both.relays
            running = asyncio.create_task(both.post())
            await until(lambda: any(f.first_token_s for f in relay.desk.flights.values()))
            await both.die()
            running.cancel()
            await until(lambda: not relay.desk.flights)
            await upstream.calls[0].wait_closed()
            router = await both.open_router(log)
            await until(lambda: router.stats.requests.values)
            both.assert_idle()
            router.driver.writer = None
        kinds = [type(entry.e).__name__ for entry in log.entries() if hasattr(entry.e, "request_id")]
        assert kinds == ["RequestCancelled"]
        kinds = [type(entry.e).__name__ for entry in log.entries() if hasattr(entry.e, "request")]
        assert kinds == ["RequestAdopted"]

    asyncio.run(run())


def test_an_id_in_use_on_another_relay_is_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as upstream, pair(tmp_path, upstream, relays=2) as both:
            first = asyncio.create_task(both.post(relay=0, x_request_id="same"))
            await until(lambda: len(upstream.calls) == 1)
            second = asyncio.create_task(both.post(relay=1, x_request_id="same"))
            await until(lambda: len(upstream.calls) == 2)
            assert upstream.calls[0].headers["x-request-id"] == "same"
            gate.open.set()
            replies = await asyncio.gather(first, second)
            assert [text_of(r.body) for r in replies] == ["abc", "abc"]
            assert replies[0].header(b"x-request-id") == b"same"
            assert replies[1].header(b"x-request-id").startswith(b"wb-")
            assert both.router is not None
            await until(lambda: not both.router.driver.flights)
            both.assert_idle()

    asyncio.run(run())


def test_a_failed_attempt_goes_elsewhere_and_the_engine_is_blamed(tmp_path: Path) -> None:
    async def run() -> None:
        async def broken(call: Call) -> None:
            call.reset()

        async with (
            FakeUpstream(broken) as bad,
            FakeUpstream(answer) as good,
            pair(tmp_path, bad, good, router=RouterSettings(policy="round_robin")) as both,
        ):
            replies = [await both.post() for _ in range(14)]
            assert [r.status for r in replies] == [200] * 14
            router = both.router
            assert router is not None
            await until(lambda: not router.driver.flights)
            assert router.health.describe(router.driver.endpoints["i0"]) == "ejected"
            outcomes = {r.outcome.outcome.partition(":")[0] for r in router.driver.decisions if r.outcome is not None}
            assert outcomes == {"ok", "attempt failed"}
            both.assert_idle()

    asyncio.run(run())


def test_a_quota_is_one_for_all_relays_and_unused_tokens_come_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream, relays=2, keys=KEYS) as both:
            router = both.router
            assert router is not None
            for n in range(3):  # 12 tokens are used: the rest comes back, or the third would be refused
                assert (await both.post(chat(max_tokens=20), relay=n % 2)).status == 200
                await until(lambda: not router.driver.flights)
            taken = await asyncio.gather(*(both.post(chat(max_tokens=30), relay=n % 2) for n in range(6)))
            refused = [r for r in taken if r.status == 429]
            assert len(refused) >= 5
            assert refused[0].json()["error"]["message"] == "This key may use 60 tokens per minute."
            assert refused[0].header(b"retry-after")
            await until(lambda: not router.driver.flights)
            both.assert_idle()
            assert all(relay.desk.quotas._keys == {} for relay in both.relays)
            assert router.surface.quotas._charged == {}

    asyncio.run(run())


def test_a_late_order_to_stop_an_attempt_that_was_followed_by_another_means_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as upstream, pair(tmp_path, upstream) as both:
            (relay,) = both.relays
            running = asyncio.create_task(both.post())
            await until(lambda: any(f.first_token_s for f in relay.desk.flights.values()))
            (name,) = relay.desk.flights
            relay.desk.stop(Stop(name, 7, "of another attempt"))
            relay.desk.stop(Stop("unknown", 1, "of another request"))
            gate.open.set()
            assert text_of((await running).body) == "abc"

    asyncio.run(run())


def test_a_router_that_does_not_read_is_not_sent_more_and_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream) as both:
            (relay,) = both.relays
            relay.link.pause_writing()  # what the transport calls beyond its bound
            reply = await both.post()
            assert reply.status == 503
            assert reply.header(b"x-weighbridge-reason") == b"gateway_busy"
            relay.link.resume_writing()
            assert (await both.post()).status == 200

    asyncio.run(run())


def test_what_cannot_be_read_cuts_the_connection_and_a_new_one_is_made(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream) as both:
            (relay,) = both.relays
            router = both.router
            assert router is not None
            assert router.hub is not None
            line = router.hub.lines[1]
            line.data_received((3).to_bytes(4, "big") + b"\xff\xff\xff")
            await until(lambda: router.hub is not None and router.hub.lines.get(1) not in (None, line))
            await until(lambda: relay.desk.connected)
            assert (await both.post()).status == 200

    asyncio.run(run())


def test_a_router_that_says_nothing_is_left_for_the_next(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream) as both:
            (relay,) = both.relays
            router = both.router
            assert router is not None
            assert router.hub is not None
            line = router.hub.lines[1]

            def followed() -> bool:
                assert router.hub is not None
                if router.hub.lines.get(1) is line:
                    relay.link.heard_s = -60.0  # whatever it says: as if it had not
                return router.hub.lines.get(1) not in (None, line)

            await until(followed)
            await until(lambda: relay.desk.connected)
            assert (await both.post()).status == 200

    asyncio.run(run())


def test_a_request_at_which_the_router_fails_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        gate = Gate()
        settings = RouterSettings(policy=failing_policy.NAME)
        async with FakeUpstream(gate) as upstream, pair(tmp_path, upstream, router=settings) as both:
            router = both.router
            assert router is not None
            running = asyncio.create_task(both.post())
            await until(lambda: len(upstream.calls) == 1)
            monkeypatch.setattr(failing_policy.Failing, "broken", True)
            reply = await both.post()
            assert reply.status == 500
            assert reply.header(b"x-weighbridge-reason") == b"internal_error"
            monkeypatch.setattr(failing_policy.Failing, "broken", False)
            gate.open.set()
            assert text_of((await running).body) == "abc"
            await until(lambda: not router.driver.flights)
            both.assert_idle()

    asyncio.run(run())


def test_an_order_that_fails_in_a_relay_ends_its_request_only(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream) as both:
            (relay,) = both.relays
            endpoint = relay.desk.endpoints["i0"]
            settings = endpoint.settings
            endpoint.settings = msgspec.structs.replace(settings, aliases={MODEL: 1 + 1j})
            reply = await both.post()
            assert (reply.status, reply.header(b"x-weighbridge-reason")) == (500, b"internal_error")
            endpoint.settings = settings
            assert (await both.post()).status == 200
            router = both.router
            assert router is not None
            await until(lambda: not router.driver.flights)
            both.assert_idle()

    asyncio.run(run())


def test_a_disaggregated_request_starts_again_when_the_router_dies_between_its_legs(tmp_path: Path) -> None:
    async def run() -> None:
        prefills = 0
        hang = asyncio.Event()

        async def prefill(call: Call) -> None:
            nonlocal prefills
            prefills += 1
            if prefills == 1:
                hang.set()
                await call.wait_closed(10.0)
                return
            params = {"remote_engine_id": "p", "remote_block_ids": [1]}
            await call.reply(200, json.dumps({"choices": [], "kv_transfer_params": params}).encode())

        per = [{"kind": "vllm", "role": "prefill"}, {"kind": "vllm", "role": "decode"}]
        async with (
            FakeUpstream(prefill) as one,
            FakeUpstream(answer) as two,
            pair(tmp_path, one, two, per=per) as both,
        ):
            (relay,) = both.relays
            job = asyncio.create_task(both.post())
            await hang.wait()
            await both.die()
            router = await both.open_router()
            reply = await job
            assert reply.status == 200
            assert text_of(reply.body) == "abc"
            assert prefills == 2
            assert json.loads(two.calls[-1].body)["kv_transfer_params"]["remote_engine_id"] == "p"
            await until(lambda: not router.driver.flights and not relay.desk.flights)
            both.assert_idle()

    asyncio.run(run())


def test_an_engine_that_leaves_drains_over_relays(tmp_path: Path) -> None:
    async def run() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as one, FakeUpstream(answer) as two, pair(tmp_path, one) as both:
            router = both.router
            assert router is not None
            running = asyncio.create_task(both.post())
            await until(lambda: len(one.calls) == 1)
            await router.add_instance(instance(two, "new"))
            removal = asyncio.create_task(router.remove_instance("i0"))
            await until(lambda: router.driver.endpoints.get("new") is not None and router.driver.endpoints["new"].up)
            assert (await both.post()).status == 200
            assert len(two.calls) == 1
            assert not removal.done()
            gate.open.set()
            assert text_of((await running).body) == "abc"
            assert await removal
            (relay,) = both.relays
            await until(lambda: set(relay.desk.endpoints) == {"new"})

    asyncio.run(run())


def test_an_urgent_tier_and_models_of_keys_hold_in_relays(tmp_path: Path) -> None:
    async def run() -> None:
        keys = (KeySettings(sha256=hashlib.sha256(b"k").hexdigest(), tenant="t", models=("other",)),)
        tiers = (Tier(name="standard", priority=1), Tier(name="gold", priority=0))
        router = RouterSettings(policy="least_requests", tiers=tiers)
        async with FakeUpstream(answer) as upstream, pair(tmp_path, upstream, keys=keys, router=router) as both:
            assert (await both.post()).json()["error"]["code"] == "model_not_found"
            assert (await both.post(x_weighbridge_tier="silver")).status in (400, 404)

    asyncio.run(run())


def test_choosing_a_model_is_refused_with_relays(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave one of the two out"):
        Gateway(GatewaySettings(relays=1, selection=SelectionSettings()), {})
