"""Ten thousand short requests over HTTP, a fifth of them cancelled: memory, slots, threads and files before and after.

python benchmarks/engine_soak.py --requests 10000 [--library PATH]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from weighbridge.engine.instance import InstanceOptions
from weighbridge.http import ClientLimits, ExchangeFailed, HttpClient

CLIENTS = 24


def facts(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "rss_mib": int(status["VmRSS"].split()[0]) // 1024,
        "threads": int(status["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


async def one(client: HttpClient, url: str, rng: random.Random, counts: dict[str, int]) -> None:
    prompt = [rng.randrange(1000, 40000) for _ in range(rng.randrange(2, 5))]
    body = {"prompt": prompt, "max_tokens": rng.randrange(1, 4), "stream": rng.random() < 0.5, "temperature": 0}
    call = client.request("POST", url + "/v1/completions", body=json.dumps(body).encode(), timeout_s=300.0)
    try:
        if rng.random() < 0.2:
            await asyncio.wait_for(call, rng.random() * 0.5)
        else:
            reply = await call
            assert reply.status == 200, reply.body
        counts["finished"] += 1
    except TimeoutError:
        counts["cancelled"] += 1
    except ExchangeFailed:
        counts["failed"] += 1


async def drive(url: str, pid: int, requests: int) -> dict[str, object]:
    client = HttpClient(ClientLimits())
    counts = {"finished": 0, "cancelled": 0, "failed": 0}
    samples = []
    todo = iter(range(requests))
    begun = time.monotonic()

    async def worker() -> None:
        for number in todo:
            await one(client, url, random.Random(number), counts)
            if number % (requests // 10) == 0:
                samples.append({"at": number, **facts(pid)})
                print(samples[-1], counts, f"{time.monotonic() - begun:.0f} s", flush=True)

    await asyncio.gather(*(worker() for _ in range(CLIENTS)))
    for _ in range(200):
        page = (await client.request("GET", url + "/metrics", timeout_s=30.0)).body.decode()
        gauges = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in page.splitlines()
            if line.startswith(("vllm:num_requests_", "vllm:kv_cache_usage"))
        }
        if not any(gauges.values()):
            break
        await asyncio.sleep(0.05)
    await client.close()
    await asyncio.sleep(1.0)
    return {"counts": counts, "gauges": gauges, "end": facts(pid), "samples": samples}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--library")
    arguments = parser.parse_args()
    options = InstanceOptions(
        slots=8, context_tokens=256, threads=1, probe=False, prefix_store_bytes=16 << 20, library=arguments.library
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "weighbridge.engine.child", msgspec.json.encode([options]).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdin is not None
    for line in child.stdout:
        message = json.loads(line)
        if "ready" in message:
            break
    url = f"http://127.0.0.1:{message['ready']['port']}"
    result = asyncio.run(drive(url, child.pid, arguments.requests))
    print(json.dumps(result, indent=1))
    child.terminate()
    child.wait()


if __name__ == "__main__":
    main()
