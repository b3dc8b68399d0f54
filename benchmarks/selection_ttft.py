"""What `model: auto` adds to the time to first token, against naming the model, through a real `weighbridge serve`.

    python benchmarks/selection_ttft.py --requests 600

The engine is a scripted one in this process that answers at once and serves all eight models of the packaged pool, so
the difference is the gateway's own. Requests alternate in a seeded order, one at a time; prompts are about 1,024 and
256 tokens long and differ each time. Prints JSON: medians, and the median of the paired differences with its
95 % bootstrap interval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gateway import answer
from tests.support.upstream import FakeUpstream
from weighbridge.selection.opening import open_selector
from weighbridge.selection.timing import bench_text

ROOT = Path(__file__).resolve().parents[1]
WARM_UP = 40


def body(model: str, text: str) -> bytes:
    return json.dumps(
        {"model": model, "stream": True, "max_tokens": 20, "messages": [{"role": "user", "content": text}]}
    ).encode()


async def first_token_s(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes
) -> tuple[float, str]:
    """Seconds from sending until the first content frame, and the model named in the reply's head."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    begun = time.perf_counter()
    writer.write(head % len(payload) + payload)
    await writer.drain()
    seen = b""
    took = 0.0
    while b"[DONE]" not in seen or not seen.endswith(b"0\r\n\r\n"):
        data = await reader.read(1 << 16)
        if not data:
            raise RuntimeError(f"the gateway closed the connection: {seen[:300]!r}")
        seen += data
        if not took and b'"content": "a"' in seen:
            took = time.perf_counter() - begun
    if not seen.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"unexpected reply: {seen[:300]!r}")
    chosen = seen.partition(b"x-weighbridge-model: ")[2].partition(b"\r\n")[0].decode()
    return took, chosen


async def measure(url: str, tokens: int, requests: int, model: str, seed: int) -> dict[str, Any]:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    order = random.Random(seed)
    named: list[float] = []
    auto: list[float] = []
    for n in range(WARM_UP + requests):
        text = bench_text(tokens, n)
        pair = {}
        for kind in order.sample(("named", "auto"), 2):
            wanted = "auto" if kind == "auto" else model
            pair[kind], chosen = await first_token_s(reader, writer, body(wanted, text))
            if (kind == "auto") != bool(chosen):
                raise RuntimeError(f"{kind} request was answered by {chosen!r}")
        if n >= WARM_UP:
            named.append(pair["named"])
            auto.append(pair["auto"])
    writer.close()
    gaps = 1e3 * (np.array(auto) - np.array(named))
    generator = np.random.default_rng(seed)
    medians = [np.median(gaps[generator.integers(0, len(gaps), len(gaps))]) for _ in range(2000)]
    low, high = np.quantile(medians, [0.025, 0.975])
    return {
        "tokens": tokens,
        "requests": requests,
        "named_p50_ms": round(1e3 * float(np.median(named)), 3),
        "auto_p50_ms": round(1e3 * float(np.median(auto)), 3),
        "added_p50_ms": round(float(np.median(gaps)), 3),
        "added_low_ms": round(float(low), 3),
        "added_high_ms": round(float(high), 3),
        "added_p95_ms": round(float(np.quantile(gaps, 0.95)), 3),
    }


def config(folder: Path, upstream: str, models: tuple[str, ...], gate: bool) -> Path:
    """All models on one instance, as the policy does not matter here."""
    path = folder / "config.yaml"
    listed = ", ".join(models)
    path.write_text(
        f"instances:\n  - {{name: one, url: '{upstream}', kind: openai, models: [{listed}]}}\n"
        f"selection: {{gate: {str(gate).lower()}}}\n"
    )
    return path


async def main(args: argparse.Namespace) -> None:
    models = open_selector().pool.names
    async with FakeUpstream(answer) as upstream:
        with tempfile.TemporaryDirectory() as folder:
            settings = config(Path(folder), upstream.url, models, gate=False)
            command = [sys.executable, "-m", "weighbridge.cli", "serve", "--config", str(settings), "--json"]
            command += ["--port", "0", "--admin-port", "0", "--data-dir", folder]
            process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
            try:
                assert process.stdout is not None
                ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
                rows = [await measure(ready["url"], t, args.requests, models[0], args.seed) for t in (1024, 256)]
            finally:
                process.terminate()
                await process.wait()
    print(json.dumps({"candidates": len(models), "seed": args.seed, "sizes": rows}, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    asyncio.run(main(parser.parse_args()))
