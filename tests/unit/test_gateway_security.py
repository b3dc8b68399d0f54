"""Keys, tenants, the admin listener's guards, secrets that must not leak, and clients that attack by being slow."""

import asyncio
import gzip
import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import MODEL, answer, chat, frame, front, instance, text_of
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.gateway import Gateway, GatewaySettings, KeySettings
from weighbridge.http import HttpClient, ServerLimits

CANARY = "sk-canary-7f3a9c51d2"
UPSTREAM_CANARY = "up-canary-81b2e6f09a"


def key(secret: str, **fields: Any) -> KeySettings:
    return KeySettings(sha256=hashlib.sha256(secret.encode()).hexdigest(), **{"tenant": "t1", **fields})


def test_keys() -> None:
    async def main() -> None:
        keys = (
            key("good"),
            key("off", disabled=True),
            key("narrow", tenant="t2", tier="batch", models=("other",)),
        )
        async with FakeUpstream(answer) as upstream, front(upstream, keys=keys) as f:
            bodies = set()
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Bearer off"}, {"x_api_key": "x"}):
                reply = await f.post(chat(), **headers)
                assert reply.status == 401
                bodies.add(reply.body)
            assert len(bodies) == 1, "one answer for every kind of bad key"
            assert upstream.calls == []
            assert (await f.post(chat(), authorization="Bearer good")).status == 200
            assert (await f.post(chat(), x_api_key="good")).status == 200
            assert (await f.post(chat(), authorization="bearer good")).status == 200
            assert (await f.post(chat(), authorization="Bearer narrow")).status == 404
            assert (await f.get("/v1/models")).status == 401
            assert (await f.get("/healthz")).status == 200

    run(main())


def test_a_refused_key_is_answered_before_the_body() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, keys=(key("good"),)) as f:
            reader, writer = await asyncio.open_connection("127.0.0.1", f.gateway.port)
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\nauthorization: Bearer {}\r\n"
            )
            writer.write((head.format("bad") + "content-length: 1000000\r\n\r\n").encode())
            answered = await reader.read(-1)
            assert answered.startswith(b"HTTP/1.1 401")
            assert b"100 Continue" not in answered
            writer.close()

    run(main())


def test_tiers() -> None:
    async def main() -> None:
        gate = asyncio.Semaphore(0)

        async def held(call: Call) -> None:
            await gate.acquire()
            await answer(call)

        keys = (key("free"), key("fixed", tier="batch"))
        async with FakeUpstream(held) as upstream, front(upstream, keys=keys) as f:
            seen = []
            flights = f.gateway.driver.flights
            for secret, body, headers in (
                ("free", {}, {}),
                ("free", {"service_tier": "priority"}, {}),
                ("free", {"service_tier": "flex"}, {}),
                ("free", {"service_tier": "flex"}, {"x_weighbridge_tier": "interactive"}),
                ("fixed", {"service_tier": "priority"}, {"x_weighbridge_tier": "interactive"}),
            ):
                task = asyncio.create_task(f.post(chat(**body), authorization=f"Bearer {secret}", **headers))
                await until(lambda: bool(flights))
                seen += [flight.routed.tier for flight in flights.values()]
                gate.release()
                assert (await task).status == 200
            assert seen == ["standard", "interactive", "batch", "interactive", "batch"]
            reply = await f.post(chat(), authorization="Bearer free", x_weighbridge_tier="root")
            assert (reply.status, reply.json()["error"]["code"]) == (400, "unknown_tier")

    run(main())


def test_tenants_get_different_cache_salts_and_clients_cannot_choose_theirs() -> None:
    async def main() -> None:
        keys = (key("a", tenant="t1"), key("a2", tenant="t1"), key("b", tenant="t2"))
        async with FakeUpstream(answer) as upstream, front(upstream, keys=keys) as f:
            for secret in ("a", "a2", "b"):
                await f.post(chat(), authorization=f"Bearer {secret}")
                await f.post(chat(cache_salt="mine"), authorization=f"Bearer {secret}")
            salts = [json.loads(call.body)["cache_salt"] for call in upstream.calls]
            assert salts[0] == salts[1] == salts[2] == salts[3]
            assert salts[4] == salts[5]
            assert salts[0] != salts[4]
            assert "mine" not in salts
            assert "t1" not in salts[0]

    run(main())


def test_token_limits_of_a_key() -> None:
    async def main() -> None:
        keys = (key("small", tokens_per_minute=60), key("large"))
        async with FakeUpstream(answer) as upstream, front(upstream, keys=keys) as f:
            statuses = [(await f.post(chat(), authorization="Bearer small")).status for _ in range(8)]
            assert statuses[0] == 200
            assert statuses[-1] == 429
            reply = await f.post(chat(), authorization="Bearer small")
            assert reply.json()["error"]["code"] == "rate_limit_exceeded"
            assert 1 <= int(reply.header(b"retry-after")) <= 60
            assert (await f.post(chat(), authorization="Bearer large")).status == 200
            f.assert_idle()

    run(main())


def test_a_client_that_leaves_early_pays_for_what_it_got() -> None:
    async def main() -> None:
        sent = asyncio.Event()

        async def script(call: Call) -> None:
            await call.sse_head()
            for _ in range(60):
                await call.chunk(frame("a"))
            sent.set()
            await call.wait_closed()

        async with FakeUpstream(script) as upstream, front(upstream, keys=(key("k", tokens_per_minute=1000),)) as f:
            task = asyncio.create_task(f.post(chat(max_tokens=500), authorization="Bearer k"))
            await sent.wait()
            await until(lambda: any(flight.first_token_s for flight in f.gateway.driver.flights.values()))
            await asyncio.sleep(0.05)
            task.cancel()
            await until(lambda: not f.gateway.driver.flights)
            (bucket,) = f.gateway.surface.quotas._buckets.values()
            assert 800 < bucket._level < 945, "sixty tokens and the prompt are gone, the rest of the budget is back"
            assert (await f.post(chat(max_tokens=990), authorization="Bearer k")).status == 429

    run(main())


def test_secrets_stand_in_no_log_metric_error_or_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPSTREAM_KEY", UPSTREAM_CANARY)
    caplog.set_level(logging.DEBUG)
    prompt = "prompt-canary-5521"

    async def script(call: Call) -> None:
        assert call.headers["authorization"] == f"Bearer {UPSTREAM_CANARY}"
        if b"fail" in call.body:
            call.reset()
        else:
            await answer(call)

    async def main() -> list[bytes]:
        out: list[bytes] = []
        fields = {"api_key_env": "UPSTREAM_KEY"}
        settings = {"keys": (key(CANARY),), "data_dir": str(tmp_path)}
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields=fields, **settings) as f:
            messages = [{"role": "user", "content": prompt}]
            for body in (chat(messages=messages), chat(messages=messages, user="fail"), b"{bad " + CANARY.encode()):
                for secret in (CANARY, CANARY + "x"):
                    reply = await f.post(body, authorization=f"Bearer {secret}", x_weighbridge_explain="1")
                    out += [reply.body, *(v for _, v in reply.headers)]
            out.append((await f.post(chat(), f"/v1/nope?key={CANARY}", authorization=f"Bearer {CANARY}")).body)
            for path in ("/metrics", "/fleet", "/decisions?last=100"):
                out.append((await f.get(path, admin=True)).body)
            assert f.gateway.writer is not None
            f.gateway.writer.sync()
        out += [p.read_bytes() for p in tmp_path.iterdir()]
        return out

    out = run(main())
    text = b"\n".join(out).decode("utf-8", "replace") + caplog.text
    assert "wb-" in text
    for secret in (CANARY, UPSTREAM_CANARY, prompt):
        assert secret not in text


def test_admin_refuses_other_hosts_and_origins() -> None:
    async def main() -> None:
        async with front(hosts=("gw.internal",)) as f:
            url = f"http://127.0.0.1:{f.gateway.admin_port}/fleet"

            async def ask(**headers: str) -> int:
                reader, writer = await asyncio.open_connection("127.0.0.1", f.gateway.admin_port)
                lines = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
                writer.write(f"GET /fleet HTTP/1.1\r\n{lines}connection: close\r\n\r\n".encode())
                data = await reader.read(-1)
                writer.close()
                return int(data.split(b" ")[1])

            assert (await f.client.request("GET", url)).status == 200
            assert await ask(host="localhost:1") == 200
            assert await ask(host="gw.internal") == 200
            assert await ask(host="evil.example") == 421
            assert await ask(host="evil.example:8081") == 421
            assert await ask(host="127.0.0.1.evil.example") == 421
            assert await ask(host="localhost:8081", origin="http://evil.example") == 403
            assert await ask(host="localhost:8081", origin="http://localhost:8081") == 200

    run(main())


def test_admin_off_loopback_needs_its_token() -> None:
    async def main() -> None:
        settings = GatewaySettings(
            port=0, admin_port=0, admin_host="0.0.0.0", admin_token_env="TOKEN", hosts=("127.0.0.1",)
        )
        gateway = Gateway(settings, {"TOKEN": "t" * 32})
        await gateway.start()
        client = HttpClient()
        base = f"http://127.0.0.1:{gateway.admin_port}"
        for headers, status in (((), 401), ((("authorization", "Bearer no"),), 401)):
            assert (await client.request("GET", base + "/fleet", headers=headers)).status == status
        good = (("authorization", "Bearer " + "t" * 32),)
        assert (await client.request("GET", base + "/fleet", headers=good)).status == 200
        assert (await client.request("POST", base + "/instances/drain?name=x")).status == 401
        assert (await client.request("GET", base + "/healthz")).status == 200
        await client.close()
        await gateway.stop()

    run(main())


def test_compressed_bodies() -> None:
    async def main() -> None:
        limits = ServerLimits(max_body_bytes=20_000)
        async with (
            FakeUpstream(answer) as upstream,
            front(upstream, server=limits, instance_fields={"kind": "vllm"}) as f,
        ):
            body = chat(stream=False)
            reply = await f.post(gzip.compress(body), content_encoding="gzip")
            assert reply.status == 200
            assert upstream.calls[0].body == body
            assert "content-encoding" not in upstream.calls[0].headers
            bomb = gzip.compress(b" " * 5_000_000)
            assert (await f.post(bomb, content_encoding="gzip")).status == 413
            assert (await f.post(gzip.compress(body)[:-10], content_encoding="gzip")).status == 400
            assert (await f.post(body, content_encoding="gzip")).status == 400
            assert (await f.post(body, content_encoding="br")).status == 415
            assert (await f.post(b" " * 30_000)).status == 413

    run(main())


def test_no_client_field_changes_where_a_request_goes() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            hostile = {"api_base": "http://10.0.0.1", "base_url": "http://10.0.0.1", "metadata": {"api_base": "x"}}
            reply = await f.post(
                chat(**hostile), x_target_url="http://10.0.0.1", forwarded="host=evil", x_forwarded_host="evil"
            )
            assert reply.status == 200
            assert upstream.calls[0].headers["host"] == f"127.0.0.1:{upstream.port}"

    run(main())


def test_a_client_that_never_reads_stops_its_engine_and_is_cut() -> None:
    async def main() -> None:
        sent = 0

        async def flood(call: Call) -> None:
            nonlocal sent
            await call.sse_head()
            data = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 60_000)
            try:
                for _ in range(3000):
                    await call.chunk(data)
                    sent += len(data)
            except ConnectionError:
                call.keep_alive = False

        limits = ServerLimits(write_s=1.0)
        async with FakeUpstream(flood) as upstream, front(upstream, server=limits) as f:
            writers = []
            for _ in range(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", f.gateway.port, limit=1024)
                writer.transport.pause_reading()
                body = chat()
                head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
                writer.write(head + body)
                writers.append((reader, writer))
            before = -1
            while before != sent:
                before = sent
                await asyncio.sleep(0.15)
            assert sent < 5 * 20_000_000, "bounded by socket buffers and windows, far below the 900 MB offered"
            started = time.monotonic()
            assert (await f.client.request("GET", f.url + "/healthz")).status == 200
            assert time.monotonic() - started < 1.0
            await until(lambda: not f.gateway.driver.flights, 10.0)
            await until(lambda: all(not c.keep_alive for c in upstream.calls), 5.0)
            f.assert_idle()
            for _, writer in writers:
                writer.close()

    run(main())


def test_slow_clients_do_not_hurt_the_others() -> None:
    async def main() -> None:
        limits = ServerLimits(head_s=1.0, body_s=1.0)
        async with FakeUpstream(answer) as upstream, front(upstream, server=limits) as f:
            sockets = []
            for n in range(300):
                reader, writer = await asyncio.open_connection("127.0.0.1", f.gateway.port)
                head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
                writer.write(head if n % 2 else head + b"content-length: 100000\r\n\r\n{")
                sockets.append((reader, writer))
            for _ in range(20):
                assert text_of((await f.post(chat())).body) == "abc"
            ends = await asyncio.gather(*(reader.read(-1) for reader, _ in sockets))
            assert all(end.startswith(b"HTTP/1.1 408") for end in ends)
            for _, writer in sockets:
                writer.close()
            await until(lambda: len(f.gateway.server.connections) <= 2)
            assert f.gateway.server.buffered_bytes == 0

    run(main())


def test_held_bodies_are_bounded_over_all_connections() -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def held(call: Call) -> None:
            await gate.wait()
            await answer(call)

        limits = ServerLimits(max_buffered_bytes=2_000_000)
        async with FakeUpstream(held) as upstream, front(upstream, server=limits) as f:
            body = chat(stream=False, padding="x" * 400_000)
            tasks = [asyncio.create_task(f.post(body)) for _ in range(10)]
            await until(lambda: sum(t.done() for t in tasks) >= 5)
            refused = [t.result().status for t in tasks if t.done()]
            assert set(refused) == {503}
            gate.set()
            statuses = [(await t).status for t in tasks]
            assert set(statuses) == {200, 503}
            assert 3 <= statuses.count(200) <= 5
            assert f.gateway.server.buffered_bytes == 0
            f.assert_idle()

    run(main())


def test_names_of_models_are_safe_everywhere() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream:
            odd = "模型🙂\n\r\t\"'{}"
            instances = (instance(upstream, "i0", models=(odd, MODEL)),)
            async with front(instances=instances) as f:
                reply = await f.post(chat(model=odd), x_weighbridge_explain="1")
                assert reply.status == 200
                assert (await f.get("/metrics", admin=True)).status == 200
                assert odd in [m["id"] for m in (await f.get("/v1/models")).json()["data"]]
                reply = await f.post(chat(model="unknown\r\nx-evil: 1"))
                assert reply.status == 404
                assert reply.header(b"x-evil") is None

    run(main())
