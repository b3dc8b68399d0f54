"""A gateway under everything at once for a long time: memory, file descriptors and threads must stay flat.

    python -m benchmarks.gateway_soak [--hour-at 60] [--seconds 690] [--relays 0]

It sends the requests of an hour at `--hour-at` a second (216,000 at 60) as fast as two cores carry them, and at most
`--seconds` long; fewer than that are a soak of what was sent, which the result says. What depends on requests (books,
logs, pools, caches, counters) goes through an hour; what depends on the clock alone goes through the time it took.

The gateway runs in a process of its own (with relays in several, whose memory, descriptors and threads are added up)
with event log, access log and keys; before it three engines that answer, stream, say no, break off, stall and die;
clients that stream, ask whole, leave midway (a fifth), read slowly, send nonsense or a wrong key; a reload every 20 s
and a scrape every second. Prints a line every half minute and one JSON object; exit status 1 if memory grew by more
than 2 % over the second half, anything was left over, or the requests of the hour were not reached.
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
KINDS = ("fd", "task")


class Goal:
    """So many requests, or so much time."""

    def __init__(self, requests: int, seconds: float) -> None:
        self.requests = requests
        self.ends: collections.Counter[str] = collections.Counter()
        self._until_s = time.monotonic() + seconds

    def reached(self) -> bool:
        return sum(self.ends.values()) >= self.requests or time.monotonic() >= self._until_s


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

    def __init__(self, url: str, seed: int, goal: Goal) -> None:
        self._url = url + "/v1/chat/completions"
        self._rng = random.Random(seed)
        self._goal = goal
        self._client = HttpClient(ClientLimits())

    async def run(self) -> None:
        ends = self._goal.ends
        while not self._goal.reached():
            try:
                ends[await self._one()] += 1
            except ExchangeFailed as error:
                ends[type(error).__name__] += 1
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


def sample(served: Served) -> tuple[float, int, int]:
    """Resident MB, descriptors and threads of all its processes."""
    pids = [served.process.pid, *served.ready.get("relay_pids", ())]
    pids += [served.ready["router_pid"]] if "router_pid" in served.ready else []
    descriptors, threads = (sum(1 for pid in pids for _ in Path(f"/proc/{pid}/{kind}").iterdir()) for kind in KINDS)
    return sum(map(rss_bytes, pids)) / 1e6, descriptors, threads


def change(file: Path) -> None:
    """Another setting, so that a reload changes something."""
    settings = json.loads(file.read_text())
    settings["max_loop_lag_s"] = 0.25 if settings.get("max_loop_lag_s") == 0.5 else 0.5
    file.write_text(json.dumps(settings))


async def watch(served: Served, file: Path, goal: Goal) -> list[tuple[float, int, int]]:
    """Samples, scrapes, reloads."""
    client = HttpClient(ClientLimits())
    rows: list[tuple[float, int, int]] = []
    begun = last = time.monotonic()
    while not goal.reached():
        await asyncio.sleep(SAMPLE_S)
        rows.append(sample(served))
        await client.request("GET", served.admin + "/metrics", timeout_s=10.0)
        if len(rows) % 20 == 0:
            await asyncio.to_thread(change, file)
            served.process.send_signal(signal.SIGHUP)
        if time.monotonic() - last >= 30:
            last = time.monotonic()
            megabytes, descriptors, threads = rows[-1]
            sent = sum(goal.ends.values())
            state = f"{sent:7,d} requests  {megabytes:.1f} MB  {descriptors} descriptors  {threads} threads"
            print(f"{last - begun:5.0f} s  {state}", flush=True)
    await client.close()
    return rows


async def main(rate: float, seconds: int, relays: int) -> int:
    engines = [FakeUpstream(Engine(seed)) for seed in range(3)]
    for engine in engines:
        await engine.__aenter__()
    with tempfile.TemporaryDirectory() as folder:
        rows = [{"name": f"i{n}", "url": e.url, "kind": "vllm", "models": ["m"]} for n, e in enumerate(engines)]
        file = Path(folder) / "fleet.yaml"
        key = {"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "t"}
        logs = {"access_log": str(Path(folder) / "access"), "log_bytes": 20_000_000, "log_files": 2}
        file.write_text(json.dumps({"instances": rows, "keys": [key], **logs}))
        context = serve(Path(folder), "--config", str(file), "--relays", str(relays))
        served = await asyncio.to_thread(context.__enter__)
        try:
            goal, begun_s = Goal(round(3600 * rate), seconds), time.monotonic()
            clients = [Client(served.url, seed, goal) for seed in range(WORKERS)]
            _, samples = await asyncio.gather(asyncio.gather(*(c.run() for c in clients)), watch(served, file, goal))
            took_s = time.monotonic() - begun_s
            fleet = await asyncio.to_thread(served.wait_idle)
            await asyncio.sleep(6.0)  # idle connections to engines expire
            last = sample(served)
            said = (Path(folder) / "stderr.txt").read_text()
            metrics: str = await asyncio.to_thread(served.get, "/metrics")
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
    for engine in engines:
        await engine.__aexit__()
    return report(goal, took_s, samples, last, fleet, metrics, said)


def report(
    goal: Goal,
    took_s: float,
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
    requests = sum(goal.ends.values())
    row = {
        "requests": requests,
        "seconds": round(took_s, 1),
        "requests_a_second": round(requests / took_s),
        "is_an_hour_at": round(requests / 3600, 1),
        "wanted": goal.requests,
        "ends": dict(goal.ends.most_common()),
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
    short = requests < goal.requests
    return int(short or growth > 0.02 or bool(left) or tracebacks > 0 or threads_grew or descriptors_grew)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hour-at", type=float, default=60.0, help="requests a second whose hour is sent")
    parser.add_argument("--seconds", type=int, default=690, help="the longest it may take")
    parser.add_argument("--relays", type=int, default=0, help="relay processes; 0: one process for all")
    given = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        sys.exit(loop.run(main(given.hour_at, given.seconds, given.relays)))
