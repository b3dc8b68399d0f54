"""SIGKILL of one of two engines under load: what becomes of its requests, and when it is used again.

    python benchmarks/kill.py --requests 24

Prints one JSON object: how the requests ended for their clients, how many were moved to the other engine, the seconds
until the killed engine was up again, and how many of the next requests it served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.clients import ask
from tests.support.served import Served, serve
from weighbridge.core.actions import Dispatch
from weighbridge.core.event_log import LogReader


async def burst(served: Served, count: int, tokens: int, kill: bool) -> tuple[list[str], float]:
    victim = served.instances[0]
    killed = time.monotonic()
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0, timeout=300) as api:
        jobs = [
            asyncio.create_task(ask(api, n, tokens=tokens, cancel_after_s=None, stream=n % 3 != 0))
            for n in range(count)
        ]
        if kill:
            while served.fleet()[victim["name"]]["in_flight"] < count // 3:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            os.kill(victim["pid"], signal.SIGKILL)
            killed = time.monotonic()
        return await asyncio.gather(*jobs), killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as served:
        name = served.instances[0]["name"]
        ends, killed = asyncio.run(burst(served, arguments.requests, 48, kill=True))
        while served.fleet()[name]["health"] != "up":
            time.sleep(0.02)
        back_s = time.monotonic() - killed
        served.wait_idle()
        again, _ = asyncio.run(burst(served, 16, 8, kill=False))
        used = [d["chosen"] for d in served.get("/decisions?last=16")["decisions"]].count(name)
        fleet = served.wait_idle()
        assert served.stop() == 0
        moved = 0
        for path in served.logs():
            with path.open("rb") as stream:
                for entry in LogReader(stream, path.name):
                    moved += sum(isinstance(a, Dispatch) and a.attempt > 1 for a in entry.a)
    counters = ("in_flight", "prefill_tokens", "decode_tokens", "kv_tokens")
    print(
        json.dumps(
            {
                "ends": {end: ends.count(end) for end in sorted(set(ends))},
                "moved": moved,
                "up_again_after_s": round(back_s, 2),
                "next_16": {end: again.count(end) for end in sorted(set(again))},
                "next_16_on_the_killed_one": used,
                "ledger": {n: [i[c] for c in counters] for n, i in fleet.items()},
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
