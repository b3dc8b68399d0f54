"""Engines that join and leave while requests run: reloads, discovery, slow start, and caps on ejection."""

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from tests.support.gateway import DONE, MODEL, QUICK, ROLE, answer, chat, frame, front, instance, text_of
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.errors import ConfigError
from weighbridge.gateway import Gateway, GatewaySettings
from weighbridge.gateway.discovery import Discovery, dns_instance
from weighbridge.gateway.loop_guard import LoopGuard
from weighbridge.gateway.settings import DnsSource, FileSource, HealthSettings
from weighbridge.gateway.slow_start import warm_limit
from weighbridge.http import ClientLimits, ConnectFailed


class Gate:
    """An engine whose streams wait for `open` after their first token."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, call: Call) -> None:
        await call.sse_head()
        await call.chunk(ROLE)
        await call.chunk(frame("a"))
        await self.open.wait()
        await call.chunk(frame("b"))
        await call.chunk(frame(finish="stop"))
        await call.chunk(DONE)
        await call.last_chunk()


def test_streams_go_on_while_their_engine_is_replaced_twice() -> None:
    async def main() -> None:
        gate = Gate()
        async with (
            FakeUpstream(gate) as one,
            FakeUpstream(answer) as two,
            FakeUpstream(answer) as three,
            front(one) as f,
        ):
            stream = asyncio.create_task(f.post(chat()))
            await until(lambda: f.gateway.driver.endpoints["i0"].running == 1)
            for upstream in (two, three):
                settings = msgspec.structs.replace(f.gateway.settings, instances=(instance(upstream, "i0"),))
                assert await f.gateway.reload(settings) == ["replaced i0"]
            assert (await f.post(chat())).status == 503, "nothing new goes to the engine that leaves"
            gate.open.set()
            assert text_of((await stream).body) == "ab"
            await until(lambda: "i0" in f.gateway.driver.endpoints and f.gateway.driver.endpoints["i0"].up)
            assert (await f.post(chat())).status == 200
            assert (len(one.calls), len(two.calls), len(three.calls)) == (1, 0, 1)
            f.assert_idle()

    run(main())


def test_a_reload_adds_and_removes_in_one_go_and_counts_refusals() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as one, FakeUpstream(answer) as two, front(one, one) as f:
            old = f.gateway.settings
            with pytest.raises(ConfigError, match="restart"):
                await f.gateway.reload(msgspec.structs.replace(old, data_dir="elsewhere"))
            with pytest.raises(ConfigError, match="two instances"):
                await f.gateway.reload(msgspec.structs.replace(old, instances=(instance(two, "a"), instance(two, "a"))))
            await f.gateway.add_instance(instance(two, "by-hand"))
            with pytest.raises(ConfigError, match="exists already"):
                await f.gateway.reload(msgspec.structs.replace(old, instances=(instance(two, "by-hand"),)))
            changes = await f.gateway.reload(
                msgspec.structs.replace(old, instances=(old.instances[0], instance(two, "i2")), max_loop_lag_s=9.0)
            )
            assert changes == ["added i2", "removed i1", "changed max_loop_lag_s"]
            await until(lambda: set(f.gateway.driver.endpoints) == {"i0", "i2", "by-hand"})
            await until(lambda: all(e.up for e in f.gateway.driver.endpoints.values()))
            assert await f.gateway.remove_instance("i2")
            assert await f.gateway.reload(f.gateway.settings) == ["added i2"]
            metrics = (await f.get("/metrics", admin=True)).body.decode()
            assert 'weighbridge_config_reloads_total{result="refused"} 3.0' in metrics
            assert 'weighbridge_config_reloads_total{result="ok"} 2.0' in metrics

    run(main())


def test_readiness_turns_false_while_requests_are_still_taken() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            assert (await f.get("/readyz")).status == (await f.get("/readyz", admin=True)).status == 200
            draining = asyncio.create_task(f.gateway.drain(5.0, unready_s=0.3))
            await asyncio.sleep(0.05)
            assert (await f.get("/readyz")).status == (await f.get("/readyz", admin=True)).status == 503
            assert text_of((await f.post(chat())).body) == "abc"
            assert await draining
            with pytest.raises(ConnectFailed):
                await f.post(chat())

    run(main())


def test_admin_reload_without_a_file_is_a_conflict() -> None:
    async def main() -> None:
        async with front() as f:
            url = f"http://127.0.0.1:{f.gateway.admin_port}/reload"
            assert (await f.client.request("POST", url)).status == 409

            async def reload() -> list[str]:
                raise ConfigError("no such key", source="fleet.yaml:3")

            f.gateway.on_reload = reload
            reply = await f.client.request("POST", url)
            assert reply.status == 400
            assert "fleet.yaml:3" in reply.json()["error"]["message"]

    run(main())


def test_dns_adds_each_address_and_drops_those_that_stay_away() -> None:
    async def main() -> None:
        answers: list[list[str] | OSError] = [
            ["127.0.0.1", "127.0.0.2"],
            OSError("no such name"),
            ["127.0.0.2"],
            ["127.0.0.1", "127.0.0.2"],
            ["127.0.0.2"],
            ["127.0.0.2"],
        ]

        async def resolver(host: str, port: int) -> list[str]:
            found = answers.pop(0)
            if isinstance(found, OSError):
                raise found
            return found

        async with FakeUpstream(answer) as upstream, front() as f:
            source = DnsSource(
                host="pool.internal", port=upstream.port, instance={"kind": "embedded", "models": [MODEL]}
            )
            discovery = Discovery((source,), f.gateway.membership, ClientLimits(), resolver)
            seen = []
            while answers:
                await discovery.look(0)
                seen.append(sorted(f.gateway.driver.endpoints))
            both, one = ["pool-127-0-0-1", "pool-127-0-0-2"], ["pool-127-0-0-2"]
            await until(lambda: sorted(f.gateway.driver.endpoints) == one)
            assert seen[:5] == [both] * 5, "an error or one missing address removes nobody"
            assert discovery.errors == {}

    run(main())


def test_dns_settings_are_checked_at_the_start() -> None:
    with pytest.raises(ConfigError, match="discovery of h"):
        dns_instance(DnsSource(host="h", port=1, instance={"knd": "vllm"}), "10.0.0.1")
    assert dns_instance(DnsSource(host="h.x", port=1), "fd00::1").url == "http://[fd00::1]:1"
    with pytest.raises(ConfigError, match="unknown kind"):

        async def main() -> None:
            async with front(discovery=(DnsSource(host="h", port=1, instance={"kind": "vlm"}),)):
                pass

        run(main())


def test_a_file_of_instances_is_followed_and_a_broken_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"

    async def main() -> None:
        async with FakeUpstream(answer) as one, FakeUpstream(answer) as two, front(one) as f:

            def write(*rows: tuple[str, str]) -> None:
                file.write_text(
                    json.dumps([{"name": n, "url": u, "models": [MODEL], "kind": "embedded"} for n, u in rows])
                )

            discovery = Discovery((FileSource(path=str(file)),), f.gateway.membership, ClientLimits())
            await discovery.look(0)
            assert "No such file" in discovery.errors[str(file)]
            write(("a", two.url), ("i0", two.url))
            await discovery.look(0)
            assert sorted(f.gateway.driver.endpoints) == ["a", "i0"]
            assert discovery.errors == {"i0": "its name is in use already"}
            assert f.gateway.driver.endpoints["i0"].settings.url == one.url
            for broken in ("[{name: a", "- {name: a, url: x, oops: 1}", "- {name: a, url: 'http://h'}\n" * 2):
                file.write_text(broken)
                await discovery.look(0)
                assert str(file) in discovery.errors
                assert sorted(f.gateway.driver.endpoints) == ["a", "i0"]
            await until(lambda: f.gateway.driver.endpoints["a"].up)
            write(("b", two.url))
            await discovery.look(0)
            await until(lambda: sorted(f.gateway.driver.endpoints) == ["b", "i0"])
            assert discovery.errors == {}

    run(main())


def test_a_discovered_engine_that_cannot_work_with_the_others_stays_out(tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    row = {"name": "d", "url": "http://127.0.0.1:1", "kind": "sglang", "role": "decode", "models": [MODEL]}
    file.write_text(json.dumps([row]))

    async def main() -> None:
        source = FileSource(path=str(file), every_s=0.05)
        async with FakeUpstream(answer) as one, FakeUpstream(answer) as two:
            pair = (instance(one, "p", role="prefill"), instance(two, "i0", role="decode"))
            async with front(instances=pair, discovery=(source,)) as f:
                await until(lambda: bool(f.gateway.discovery.errors))
                assert "must understand each other" in f.gateway.discovery.errors["d"]
                assert "d" not in f.gateway.driver.endpoints
                assert (await f.get("/fleet", admin=True)).json()["discovery_errors"] == f.gateway.discovery.errors

    run(main())


def test_slow_start_doubles_and_ends() -> None:
    assert [warm_limit(age, 5.0) for age in (0.0, 0.9, 1.1, 2.5, 3.0, 4.9, 5.0, 9.0)] == [1, 1, 2, 4, 8, 16, None, None]
    assert warm_limit(0.0, 0.0) is None


def test_an_instance_that_joins_a_serving_fleet_is_given_little_at_first() -> None:
    async def main() -> None:
        gate = Gate()
        health = msgspec.structs.replace(QUICK, slow_start_s=0.4)
        async with FakeUpstream(gate) as one, FakeUpstream(gate) as two, front(one, health=health) as f:
            driver = f.gateway.driver
            assert driver.endpoints["i0"].warm_limit is None, "the first one carries all there is"
            await until(lambda: driver.now() > 0.45)
            await f.gateway.add_instance(instance(two, "i1"))
            await until(lambda: driver.endpoints["i1"].up)
            tasks = [asyncio.create_task(f.post(chat(), x_weighbridge_explain="1")) for _ in range(8)]
            await until(lambda: len(driver.flights) == 8 and len(one.calls) + len(two.calls) == 8)
            assert len(two.calls) <= 2, "least_requests alone would have sent four"
            await until(lambda: driver.endpoints["i1"].warm_limit is None)
            more = [asyncio.create_task(f.post(chat())) for _ in range(4)]
            await until(lambda: len(one.calls) + len(two.calls) == 12)
            assert len(two.calls) >= 5
            gate.open.set()
            replies = await asyncio.gather(*tasks, *more)
            decisions = [json.loads(r.header(b"x-weighbridge-decision") or b"{}") for r in replies[:8]]
            assert any(c.get("excluded") == "warming up" for d in decisions for c in d["candidates"])
            f.assert_idle()

    run(main())


def test_an_instance_in_slow_start_takes_all_where_nobody_else_can() -> None:
    async def main() -> None:
        health = msgspec.structs.replace(QUICK, slow_start_s=0.3)
        async with FakeUpstream(answer) as one, FakeUpstream(answer) as two, front(one, health=health) as f:
            await until(lambda: f.gateway.driver.now() > 0.35)
            await f.gateway.add_instance(instance(two, "i1"))
            await until(lambda: f.gateway.driver.endpoints["i1"].up)
            f.gateway.health.drain(f.gateway.driver.endpoints["i0"])
            replies = await asyncio.gather(*(f.post(chat()) for _ in range(6)))
            assert {r.status for r in replies} == {200}
            assert len(two.calls) == 6

    run(main())


def test_no_more_than_the_allowed_share_is_ejected() -> None:
    async def main() -> None:
        async def broken(call: Call) -> None:
            call.reset()

        health = HealthSettings(interval_s=0.05, timeout_s=2.0, eject_failures=2, eject_s=30.0)
        upstreams = [FakeUpstream(broken) for _ in range(5)]
        for upstream in upstreams:
            await upstream.__aenter__()
        async with front(*upstreams, health=health, retry_share=1.0) as f:
            for _ in range(12):
                await f.post(chat())
            states = [f.gateway.health.describe(e) for e in f.gateway.driver.endpoints.values()]
            assert sorted(states) == ["ejected"] * 2 + ["up"] * 3, "half of five, and not one more"
            f.assert_idle()
        for upstream in upstreams:
            await upstream.__aexit__()

    run(main())


def test_retry_after_is_the_soonest_recovery() -> None:
    async def main() -> None:
        async def broken(call: Call) -> None:
            call.reset()

        health = HealthSettings(interval_s=0.05, timeout_s=2.0, eject_failures=1, eject_s=20.0)
        async with FakeUpstream(broken) as one, FakeUpstream(answer) as two, front(one, two, health=health) as f:
            ejected, other = f.gateway.driver.endpoints.values()
            while f.gateway.health.describe(ejected) != "ejected":
                assert (await f.post(chat())).status == 200
            f.gateway.health.drain(other)
            reply = await f.post(chat())
            assert reply.status == 503
            assert 19 <= int(reply.header(b"retry-after")) <= 26, "what is left of 20 s, spread by up to a quarter"
            assert abs(int(reply.header(b"retry-after-ms")) / 1000 - int(reply.header(b"retry-after"))) <= 1

    run(main())


def test_the_guard_forgives_one_pause_and_ends_below_half() -> None:
    guard = LoopGuard(0.2)
    guard.observe(60.0)
    assert not guard.shedding, "a stopped process, a sleeping laptop"
    for _ in range(20):
        guard.observe(0.4)
    assert guard.shedding
    for _ in range(3):
        guard.observe(0.15)
    assert guard.shedding, "still above half"
    for _ in range(20):
        guard.observe(0.0)
    assert not guard.shedding


def test_a_late_loop_refuses_new_work_and_lets_streams_end() -> None:
    async def main() -> None:
        gate = Gate()
        async with FakeUpstream(gate) as upstream, front(upstream) as f:
            stream = asyncio.create_task(f.post(chat()))
            await until(lambda: f.gateway.driver.endpoints["i0"].running == 1)
            f.gateway.guard.stop()
            for _ in range(20):
                f.gateway.guard.observe(1.0)
            reply = await f.post(chat())
            assert reply.status == 503
            assert reply.header(b"x-weighbridge-reason") == b"gateway_busy"
            assert int(reply.header(b"retry-after")) >= 1
            for _ in range(40):
                f.gateway.guard.observe(0.0)
            gate.open.set()
            assert text_of((await stream).body) == "ab"
            assert (await f.post(chat())).status == 200
            assert b"weighbridge_event_loop_lag_seconds" in (await f.get("/metrics", admin=True)).body
            f.assert_idle()

    run(main())


def test_no_adapter_claims_a_preemption_that_the_gateway_cannot_carry_out() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            assert all(e.spec.preemption == () for e in f.gateway.driver.endpoints.values())

    run(main())


def test_a_reload_while_the_listeners_are_being_bound_leaves_no_watch_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Found by a history: engines were added before probing began, which then began a second time for them."""

    async def main() -> None:
        async with FakeUpstream(answer) as first, FakeUpstream(answer) as second:
            settings = GatewaySettings(port=0, admin_port=0, health=QUICK, instances=(instance(first, "i0"),))
            gateway = Gateway(settings)
            starting = asyncio.create_task(gateway.start())
            await asyncio.sleep(0)
            assert not starting.done()
            changed = instance(first, "i0", client=ClientLimits(idle_s=3.5))
            await gateway.reload(msgspec.structs.replace(settings, instances=(changed, instance(second, "more"))))
            await starting
            assert await gateway.wait_ready(5.0, ("i0", "more"))
            await gateway.stop()
            await asyncio.sleep(0.2)  # some probes
            assert asyncio.all_tasks() - {asyncio.current_task()} <= first._tasks | second._tasks

    run(main())
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []
