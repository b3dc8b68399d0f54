"""How instances and settings come and go: models that are discovered, joining and leaving, reload, bad settings."""

import asyncio
import hashlib
import json

import msgspec
import pytest

from tests.support.gateway import MODEL, answer, chat, frame, front, instance
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.errors import ConfigError, ServiceError
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings, KeySettings


def test_bad_settings_are_refused_before_anything_starts() -> None:
    one = InstanceSettings(name="a", url="http://127.0.0.1:1")
    for settings in (
        GatewaySettings(instances=(one, one)),
        GatewaySettings(instances=(InstanceSettings(name="a", url="nonsense"),)),
        GatewaySettings(instances=(InstanceSettings(name="a", url="http://h", kind="nonsense"),)),
        GatewaySettings(instances=(InstanceSettings(name="a", url="http://h", api_key_env="NOT_SET"),)),
        GatewaySettings(admin_host="0.0.0.0"),
        GatewaySettings(admin_host="0.0.0.0", admin_token_env="SHORT"),
    ):
        with pytest.raises(ConfigError):
            Gateway(settings, {"SHORT": "x"})


def test_a_taken_port_is_one_clear_line() -> None:
    async def main() -> None:
        async with front() as f:
            other = Gateway(GatewaySettings(port=f.gateway.port, admin_port=0))
            with pytest.raises(ServiceError, match=str(f.gateway.port)):
                await other.start()

    run(main())


def test_discovery_reads_models_and_limits_from_the_engine() -> None:
    async def main() -> None:
        listing = {"object": "list", "data": [{"id": "found", "object": "model", "max_model_len": 777}]}
        metrics = (
            b'vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n'
            b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_running{engine="1"} 2.0\n'
            b'vllm:num_requests_waiting{engine="0"} 1.0\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
            b"process_start_time_seconds 1000.0\n"
        )
        started = [metrics]

        async def script(call: Call) -> None:
            if call.path == "/v1/models":
                await call.reply(200, json.dumps(listing).encode())
            elif call.path == "/metrics":
                await call.reply(200, started[0], "text/plain")
            elif call.path == "/health":
                await call.reply(200, b"")
            elif call.request_line.startswith("GET"):
                await call.reply(404, b"")
            else:
                await answer(call)

        async with FakeUpstream(script, health=0) as one:
            bare = InstanceSettings(name="i0", url=one.url, kind="vllm")
            async with front(instances=(bare,)) as f:
                spec = f.gateway.driver.router.fleet.instances["i0"].spec
                assert spec.models == ("found",)
                assert spec.limits.max_context == 777
                assert spec.limits.kv_tokens == 3200
                endpoint = f.gateway.driver.endpoints["i0"]
                await until(lambda: endpoint.report is not None)
                assert endpoint.report is not None
                assert (endpoint.report.running, endpoint.report.waiting, endpoint.report.kv_usage) == (5, 1, 0.25)
                assert (await f.post(chat(model="found"))).status == 200
                assert (await f.post(chat(model=MODEL))).status == 404
                started[0] = metrics.replace(b"1000.0", b"2000.0")
                await until(lambda: endpoint.generation == 2)
                assert endpoint.up

    run(main())


def test_instances_join_and_leave_while_requests_run() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def held(call: Call) -> None:
            await call.sse_head()
            await call.chunk(frame("a"))
            await gate.wait()
            await call.chunk(frame(finish="stop"))
            await call.last_chunk()

        async with FakeUpstream(held) as one, FakeUpstream(answer) as two, front(one) as f:
            running = asyncio.create_task(f.post(chat()))
            await until(lambda: len(one.calls) == 1)
            admin = f"http://127.0.0.1:{f.gateway.admin_port}/instances"
            body = json.dumps({"name": "late", "url": two.url, "kind": "embedded", "models": [MODEL]}).encode()
            assert (await f.client.request("POST", admin, body=body)).status == 201
            assert (await f.client.request("POST", admin, body=body)).status == 400
            assert (await f.client.request("POST", admin, body=b'{"name":"x","url":"nope"}')).status == 400
            assert (await f.client.request("POST", admin, body=b'{"nonsense":1}')).status == 400
            await until(lambda: f.gateway.driver.endpoints["late"].up)
            assert (await f.post(chat(stream=False))).status == 200
            removing = asyncio.create_task(f.client.request("POST", admin + "/remove?name=i0"))
            await until(lambda: f.gateway.driver.endpoints["i0"].draining)
            for _ in range(4):
                assert (await f.post(chat(stream=False))).status == 200
            assert len(one.calls) == 1, "nothing new goes there"
            assert not running.done()
            gate.set()
            assert "error" not in (await running).body.decode()
            assert (await removing).json()["all_ended"] is True
            assert set(f.gateway.driver.endpoints) == {"late"}
            assert (await f.client.request("POST", admin + "/remove?name=i0")).status == 404
            f.assert_idle()

    run(main())


def test_reload_swaps_instances_and_keys_and_refuses_what_needs_a_restart() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as one, FakeUpstream(answer) as two, front(one) as f:
            old = f.gateway.settings
            key = KeySettings(sha256=hashlib.sha256(b"k").hexdigest(), tenant="t")
            with pytest.raises(ConfigError, match="restart"):
                await f.gateway.reload(msgspec.structs.replace(old, port=old.port + 1, keys=(key,)))
            with pytest.raises(ConfigError):
                broken = (*old.instances, InstanceSettings(name="x", url="nope"))
                await f.gateway.reload(msgspec.structs.replace(old, instances=broken, keys=(key,)))
            assert (await f.post(chat())).status == 200, "a refused reload changes nothing"
            swapped = msgspec.structs.replace(old, instances=(instance(two, "i0"),), keys=(key,))
            assert await f.gateway.reload(swapped) == ["replaced i0", "changed keys"]
            await until(lambda: "i0" in f.gateway.driver.endpoints and f.gateway.driver.endpoints["i0"].up)
            assert (await f.post(chat())).status == 401
            assert (await f.post(chat(), authorization="Bearer k")).status == 200
            assert two.calls
            assert f.gateway.driver.router.fleet.instances["i0"].generation == 2
            f.assert_idle()

    run(main())
