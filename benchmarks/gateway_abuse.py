"""What attackers cost the others: the gateway in a process of its own, healthy clients beside each attack.

    python benchmarks/gateway_abuse.py [loris] [unread] [bodies] [--small]

- loris: 2,000 sockets that send a head or a body one byte a second.
- unread: a client that never reads a 200 MB stream, and 50 that read 1 KB/s.
- bodies: 5,000 requests with bodies of 1 MiB, 200 at a time.

Prints one JSON object per attack: latency of healthy requests before and during it, the gateway's resident memory
before, at most and after, and how the attackers ended.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.gateway import answer, chat
from tests.support.served import Served, rss_bytes, serve
from tests.support.upstream import Call, FakeUpstream
from weighbridge.http import ClientLimits, ExchangeFailed, HttpClient

MB = 1_000_000
FRAME = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * 60_000)


class Watch:
    """Healthy requests to an engine of their own, and the gateway's memory, in a process of their own."""

    def __init__(self, url: str, pid: int) -> None:
        self.url, self.pid = url + "/v1/chat/completions", pid
        self.client = HttpClient(ClientLimits())
        self.reset()

    def reset(self) -> None:
        self.latencies: list[float] = []
        self.failures: collections.Counter[str] = collections.Counter()
        self.most_rss = 0

    async def ask(self) -> None:
        """One request at a time, with a pause of 20 ms."""
        body = chat(model="healthy")
        while True:
            begun = time.perf_counter()
            try:
                reply = await self.client.request("POST", self.url, body=body, timeout_s=30.0)
                if reply.status != 200:
                    self.failures[str(reply.status)] += 1
            except ExchangeFailed as error:
                self.failures[type(error).__name__] += 1
            self.latencies.append(time.perf_counter() - begun)
            await asyncio.sleep(0.02)

    async def memory(self) -> None:
        while True:
            self.most_rss = max(self.most_rss, rss_bytes(self.pid))
            await asyncio.sleep(0.02)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.latencies)
        return {
            "requests": len(ordered),
            "failed": dict(self.failures),
            "p50_ms": round(statistics.median(ordered) * 1e3, 2),
            "p99_ms": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e3, 2),
            "max_ms": round(ordered[-1] * 1e3, 2),
            "most_rss_mb": round(self.most_rss / MB),
        }


async def watch() -> None:
    """The watching process: prints its engine's port, takes `URL PID`, and at each further line prints a summary."""
    loop = asyncio.get_running_loop()
    async with FakeUpstream(answer) as upstream:
        print(upstream.port, flush=True)
        url, pid = (await loop.run_in_executor(None, sys.stdin.readline)).split()
        watcher = Watch(url, int(pid))
        jobs = [asyncio.create_task(watcher.ask()) for _ in range(4)]
        jobs.append(asyncio.create_task(watcher.memory()))
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(watcher.summary()), flush=True)
            watcher.reset()
        for job in jobs:
            job.cancel()
        await watcher.client.close()


def head(length: int) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % length


async def loris(served: Served, count: int) -> dict[str, int]:
    ends: collections.Counter[str] = collections.Counter()
    port = int(served.url.rpartition(":")[2])

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begun = time.monotonic()
        whole = head(100_000) + b"{" * 1000 if number % 2 else head(5)[:-4] + b"\r\nx: " + b"y" * 1000
        first = len(head(100_000)) if number % 2 else 10
        writer.write(whole[:first])
        try:
            for byte in whole[first:]:
                await asyncio.sleep(1.0)
                if reader.at_eof() or writer.is_closing() or time.monotonic() - begun > 90:
                    break
                writer.write(bytes([byte]))
            data = await asyncio.wait_for(reader.read(-1), 5)
            ends[data[9:12].decode() or "closed"] += 1
        except (ConnectionError, TimeoutError):
            ends["cut"] += 1
        writer.close()

    await asyncio.gather(*(one(n) for n in range(count)))
    return dict(ends)


async def unread(served: Served, slow: int) -> dict[str, int]:
    ends: collections.Counter[str] = collections.Counter()
    port = int(served.url.rpartition(":")[2])

    async def one(never: bool) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2048)
        if never:
            writer.transport.pause_reading()
        body = chat(user="flood")
        writer.write(head(len(body)) + body)
        begun = time.monotonic()
        try:
            while time.monotonic() - begun < 75.0:
                await asyncio.sleep(1.0)
                if not never and not await reader.read(1024):
                    ends["closed"] += 1
                    break
            else:
                ends["still open after 75 s"] += 1
        except ConnectionError:
            ends["cut"] += 1
        writer.transport.abort()

    await asyncio.gather(one(True), *(one(False) for _ in range(slow)))
    return dict(ends)


async def bodies(served: Served, count: int, at_once: int) -> dict[str, int]:
    ends: collections.Counter[str] = collections.Counter()
    client = HttpClient(ClientLimits())
    left = iter(range(count))
    body = chat(False, padding="x" * (1 << 20))

    async def worker() -> None:
        for _ in left:
            try:
                reply = await client.request("POST", served.url + "/v1/chat/completions", body=body, timeout_s=60.0)
                ends[str(reply.status)] += 1
            except ExchangeFailed as error:
                ends[type(error).__name__] += 1

    await asyncio.gather(*(worker() for _ in range(at_once)))
    await client.close()
    return dict(ends)


async def flood_or_answer(call: Call) -> None:
    if b'"flood"' not in call.body:
        await answer(call)
        return
    await call.sse_head()
    try:
        for _ in range(200 * MB // len(FRAME)):
            await call.chunk(FRAME)
        await call.last_chunk()
    except ConnectionError:
        call.keep_alive = False


async def measure(name: str, attack: Callable[[Served], Awaitable[dict[str, int]]]) -> None:
    watcher = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--watch", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert watcher.stdin is not None and watcher.stdout is not None

    async def lap() -> dict[str, Any]:
        assert watcher.stdin is not None and watcher.stdout is not None
        watcher.stdin.write(b"lap\n")
        found: dict[str, Any] = json.loads(await watcher.stdout.readline())
        return found

    port = int(await watcher.stdout.readline())
    async with FakeUpstream(flood_or_answer) as engine:
        rows = [
            {"name": "attacked", "url": engine.url, "kind": "vllm", "models": ["m"]},
            {"name": "healthy", "url": f"http://127.0.0.1:{port}", "kind": "vllm", "models": ["healthy"]},
        ]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "fleet.yaml"
            file.write_text(json.dumps({"instances": rows, "router": {"policy": "least_requests"}}))
            context = serve(Path(folder), "--config", str(file))
            served = await asyncio.to_thread(context.__enter__)
            try:
                watcher.stdin.write(f"{served.url} {served.process.pid}\n".encode())
                await asyncio.sleep(3.0)
                before = await lap()
                begun = time.monotonic()
                ends = await attack(served)
                seconds = round(time.monotonic() - begun, 1)
                during = await lap()
                await asyncio.sleep(2.0)
                after = await lap()
                row = {"attack": name, "seconds": seconds, "attackers": ends}
                print(json.dumps({**row, "before": before, "during": during, "after": after}), flush=True)
            finally:
                watcher.stdin.close()
                await watcher.wait()
                await asyncio.to_thread(context.__exit__, None, None, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", default=["loris", "unread", "bodies"])
    parser.add_argument("--small", action="store_true", help="a tenth of each")
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watch:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(watch())
        return
    part = 10 if options.small else 1
    attacks: dict[str, Callable[[Served], Awaitable[dict[str, int]]]] = {
        "loris": lambda served: loris(served, 2000 // part),
        "unread": lambda served: unread(served, 50 // part),
        "bodies": lambda served: bodies(served, 5000 // part, 200 // part),
    }
    for name in options.attacks:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(name, attacks[name]))


if __name__ == "__main__":
    main()
