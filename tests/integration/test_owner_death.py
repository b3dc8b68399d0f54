"""The process that owns the queue is killed: nobody waits for ever, and a new owner serves from nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from pathlib import Path

from tests.support.gateway import MODEL, answer, chat
from tests.support.served import serve
from tests.support.upstream import Call, FakeUpstream
from weighbridge.http import HttpClient
from weighbridge.http.errors import ExchangeFailed

RUNNING, HELD = 1, 4


def test_held_requests_fail_at_once_when_their_router_dies_and_the_next_one_serves(tmp_path: Path) -> None:
    asyncio.run(killed(tmp_path))


async def killed(folder: Path) -> None:
    stuck = True

    async def engine(call: Call) -> None:
        if stuck and call.request_line.startswith("POST"):
            await call.wait_closed(30.0)
            return
        await answer(call)

    async with FakeUpstream(engine) as upstream:
        settings = folder / "fleet.yaml"
        settings.write_text(
            "router: {policy: least_tokens, dispatch: hold}\nhealth: {slow_start_s: 0}\ninstances:\n"
            f"  - {{name: one, url: '{upstream.url}', kind: openai, models: [{MODEL}], "
            f"limits: {{max_sequences: {RUNNING}}}}}\n"
        )
        first, second = folder / "first", folder / "second"
        for each in (first, second):
            each.mkdir()
        with_first = serve(first, "--config", str(settings))
        served = await asyncio.to_thread(with_first.__enter__)
        client = HttpClient()
        url = served.url + "/v1/chat/completions"
        headers = (("content-type", "application/json"),)
        jobs = [
            asyncio.create_task(client.request("POST", url, body=chat(stream=n % 2 == 0), headers=headers))
            for n in range(RUNNING + HELD)
        ]
        waited = time.monotonic() + 10
        while (await asyncio.to_thread(served.get, "/fleet"))["held_requests"] < HELD:
            assert time.monotonic() < waited, "the queue did not fill"
            await asyncio.sleep(0.05)
        begun = time.monotonic()
        served.process.send_signal(signal.SIGKILL)
        ends = await asyncio.gather(*jobs, return_exceptions=True)
        assert time.monotonic() - begun < 2.0
        assert all(isinstance(end, ExchangeFailed) for end in ends), ends
        await asyncio.to_thread(with_first.__exit__, None, None, None)

        stuck = False
        with_second = serve(second, "--config", str(settings))
        served = await asyncio.to_thread(with_second.__enter__)
        url = served.url + "/v1/chat/completions"
        replies = await asyncio.gather(
            *(client.request("POST", url, body=chat(stream=False), headers=headers) for _ in range(RUNNING + HELD))
        )
        assert [reply.status for reply in replies] == [200] * (RUNNING + HELD)
        assert all(json.loads(reply.body)["choices"] for reply in replies)
        fleet = await asyncio.to_thread(served.wait_idle)
        assert [fleet["one"][name] for name in ("in_flight", "prefill_tokens", "decode_tokens", "kv_tokens")] == [0] * 4
        await client.close()
        assert await asyncio.to_thread(served.stop) == 0
        await asyncio.to_thread(with_second.__exit__, None, None, None)
