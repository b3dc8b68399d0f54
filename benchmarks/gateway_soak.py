"""A gateway under everything at once for a long time: memory, file descriptors and threads must stay flat.

    python -m benchmarks.gateway_soak --seconds 600

The gateway runs in a process of its own with event log, access log and keys; before it three engines that answer,
stream, say no, break off, stall and die; clients that stream, ask whole, leave midway (a fifth), read slowly, send
nonsense or a wrong key; a reload every 20 s and a scrape every second. Prints a line every half minute and one JSON
object; exit status 1 if memory grew by more than 5 % over the second half or anything was left over.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import hashlib
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop

from tests.support.gateway import answer, chat
from tests.support.served import Served, rss_bytes, serve
from tests.support.upstream import Call, FakeUpstream
from weighbridge.http import ClientLimits, ExchangeFailed, HttpClient

KEY = "sk-soak"
WORKERS = 24
SAMPLE_S = 1.0


class Engine:
    """Answers, most of the time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    async def __call__(self, call: Call) -> None:
        await asyncio.sleep(self._rng.random() * 0.02)
        fate = self._rng.random()
        if fate < 0.02:
            call.reset()
        elif fate < 0.04:
            await call.reply(self._rng.choice((400, 429, 500, 503)), b'{"error":{"message":"no"}}')
        elif fate < 0.05:
            await call.sse_head()
            await call.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
            call.close()
        else:
            await answer(call)


class Client:
    """One worker's requests."""

    def __init__(self, url: str, seed: int, ends: collections.Counter[str]) -> None:
        self._url = url + "/v1/chat/completions"
        self._rng = random.Random(seed)
        self._ends = ends
        self._client = HttpClient(ClientLimits())

    async def run(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            try:
                self._ends[await self._one()] += 1
            except ExchangeFailed as error:
                self._ends[type(error).__name__] += 1
            await asyncio.sleep(self._rng.random() * 0.1)
        await self._client.close()

    async def _one(self) -> str:
        draw = self._rng.random()
        headers = [("authorization", f"Bearer {KEY if draw > 0.02 else 'wrong'}")]
        text = "word " * self._rng.randrange(1, 400)
        body = chat(draw < 0.7, messages=[{"role": "user", "content": text}])
        if draw < 0.04:
            body = body[:-3]
        leave_s = self._rng.random() * 0.03 if self._rng.random() < 0.2 else 30.0
        try:
            async with (
                asyncio.timeout(leave_s),
                self._client.stream("POST", self._url, body=body, headers=headers) as reply,
            ):
                async for _ in reply:
                    if draw > 0.97:
                        await asyncio.sleep(0.01)
                return str(reply.status)
        except TimeoutError:
            return "left"


def sample(pid: int) -> tuple[float, int, int]:
    """Resident MB, descriptors, threads."""
    proc = Path(f"/proc/{pid}")
    return rss_bytes(pid) / 1e6, sum(1 for _ in (proc / "fd").iterdir()), sum(1 for _ in (proc / "task").iterdir())


def change(file: Path) -> None:
    """Another setting, so that a reload changes something."""
    settings = json.loads(file.read_text())
    settings["max_loop_lag_s"] = 0.25 if settings.get("max_loop_lag_s") == 0.5 else 0.5
    file.write_text(json.dumps(settings))


async def watch(served: Served, file: Path, until_s: float) -> list[tuple[float, int, int]]:
    """Samples, scrapes, reloads."""
    client = HttpClient(ClientLimits())
    rows: list[tuple[float, int, int]] = []
    begun = last = time.monotonic()
    while time.monotonic() < until_s:
        await asyncio.sleep(SAMPLE_S)
        rows.append(sample(served.process.pid))
        await client.request("GET", served.admin + "/metrics", timeout_s=10.0)
        if len(rows) % 20 == 0:
            await asyncio.to_thread(change, file)
            served.process.send_signal(signal.SIGHUP)
        if time.monotonic() - last >= 30:
            last = time.monotonic()
            megabytes, descriptors, threads = rows[-1]
            print(
                f"{last - begun:5.0f} s  {megabytes:.1f} MB  {descriptors} descriptors  {threads} threads", flush=True
            )
    await client.close()
    return rows


async def main(seconds: int) -> int:
    ends: collections.Counter[str] = collections.Counter()
    engines = [FakeUpstream(Engine(seed)) for seed in range(3)]
    for engine in engines:
        await engine.__aenter__()
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"name": f"i{n}", "url": e.url, "kind": "vllm", "models": ["m"]} for n, e in enumerate(engines)]
        file = Path(folder) / "fleet.yaml"
        key = {"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "t"}
        logs = {"access_log": str(Path(folder) / "access"), "log_bytes": 20_000_000, "log_files": 2}
        file.write_text(json.dumps({"instances": rows, "keys": [key], **logs}))
        context = serve(Path(folder), "--config", str(file))
        served = await asyncio.to_thread(context.__enter__)
        try:
            until_s = time.monotonic() + seconds
            clients = [Client(served.url, seed, ends) for seed in range(WORKERS)]
            _, samples = await asyncio.gather(
                asyncio.gather(*(c.run(until_s) for c in clients)), watch(served, file, until_s)
            )
            fleet = await asyncio.to_thread(served.wait_idle)
            await asyncio.sleep(6.0)  # idle connections to engines expire
            last = sample(served.process.pid)
            said = (Path(folder) / "stderr.txt").read_text()
            metrics: str = await asyncio.to_thread(served.get, "/metrics")
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
    for engine in engines:
        await engine.__aexit__()
    return report(ends, samples, last, fleet, metrics, said)


def report(
    ends: collections.Counter[str],
    samples: list[Any],
    last: tuple[float, int, int],
    fleet: Any,
    metrics: str,
    said: str,
) -> int:
    half = [row[0] for row in samples[len(samples) // 2 :]]
    part = max(1, len(half) // 5)
    first, final = statistics.median(half[:part]), statistics.median(half[-part:])
    growth = final / first - 1
    left = {n: i["in_flight"] for n, i in fleet.items() if i["in_flight"]}
    tracebacks = said.count("Traceback")
    row = {
        "requests": sum(ends.values()),
        "ends": dict(ends.most_common()),
        "rss_mb_start_half_end": [round(samples[0][0], 1), round(first, 1), round(final, 1)],
        "growth_over_second_half": round(growth, 4),
        "descriptors_start_most_idle": [samples[0][1], max(r[1] for r in samples), last[1]],
        "threads_start_most_idle": [samples[0][2], max(r[2] for r in samples), last[2]],
        "reloads": [line for line in metrics.splitlines() if line.startswith("weighbridge_config_reloads_total")],
        "left_in_flight": left,
        "tracebacks": tracebacks,
    }
    print(json.dumps(row), flush=True)
    threads_grew = last[2] > samples[0][2] + 2
    descriptors_grew = last[1] > samples[0][1] + WORKERS
    return int(growth > 0.05 or bool(left) or tracebacks > 0 or threads_grew or descriptors_grew)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        sys.exit(loop.run(main(parser.parse_args().seconds)))
