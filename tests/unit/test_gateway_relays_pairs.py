"""Disaggregated requests through a relay: the Router's process judges prefill engines by what relays see of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import answer, chat, text_of
from tests.support.loop import until
from tests.support.pairs import prefill
from tests.support.relays import pair
from tests.support.upstream import Call, FakeUpstream
from weighbridge.routing.router import RouterSettings

ROLES = [{"role": "prefill", "kind": "vllm"}, {"role": "decode", "kind": "vllm"}]


@pytest.mark.parametrize("binding", ["auto", "early"])
def test_a_failing_prefill_engine_is_done_without_and_ejected(tmp_path: Path, binding: Any) -> None:
    async def broken(call: Call) -> None:
        await call.reply(500, b"{}")

    async def main() -> None:
        router = RouterSettings(policy="least_requests", binding=binding)
        async with (
            FakeUpstream(broken) as p,
            FakeUpstream(answer) as d,
            pair(tmp_path, p, d, per=ROLES, router=router) as both,
        ):
            assert both.router is not None
            endpoints = both.router.driver.endpoints
            for _ in range(3):
                reply = await both.post(chat())
                assert (reply.status, text_of(reply.body)) == (200, "abc")
            await until(lambda: not endpoints["i0"].up)
            assert endpoints["i1"].up
            assert len(p.calls) >= 5
            assert all("kv_transfer_params" not in json.loads(call.body) for call in d.calls)
            assert (await both.post(chat())).status == 200
            await until(lambda: both.router is not None and not both.router.driver.flights)
            both.assert_idle()

    asyncio.run(main())


@pytest.mark.parametrize("binding", ["auto", "early"])
def test_its_good_legs_count_for_a_prefill_engine(tmp_path: Path, binding: Any) -> None:
    async def main() -> None:
        tries = 0

        async def every_other(call: Call) -> None:
            nonlocal tries
            tries += 1
            await (call.reply(500, b"{}") if tries % 2 else prefill(call))

        router = RouterSettings(policy="least_requests", binding=binding)
        async with (
            FakeUpstream(every_other) as p,
            FakeUpstream(answer) as d,
            pair(tmp_path, p, d, per=ROLES, router=router) as both,
        ):
            for _ in range(8):
                assert (await both.post(chat())).status == 200
            assert both.router is not None
            await until(lambda: both.router is not None and not both.router.driver.flights)
            assert both.router.driver.endpoints["i0"].up, "never five failures in a row"
            assert len(p.calls) == 16
            both.assert_idle()

    asyncio.run(main())
