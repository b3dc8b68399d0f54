"""KV over HTTP between a prefill and a decode instance in two processes: bytes and seconds of 512 tokens.

    python benchmarks/engine_transfer.py --runs 20

Seconds are the decode side's own: from asking for the KV to having all of it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import urllib.request
from typing import Any

import msgspec

from weighbridge.engine.instance import InstanceOptions


def start(name: str, core: int) -> tuple[subprocess.Popen[bytes], str]:
    options = InstanceOptions(name=name, slots=2, context_tokens=1024, threads=1, cores=(core,), probe=False)
    child = subprocess.Popen(
        [sys.executable, "-m", "weighbridge.engine.child", msgspec.json.encode([options]).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    for line in child.stdout:
        message = json.loads(line)
        if "ready" in message:
            return child, f"http://127.0.0.1:{message['ready']['port']}"
    raise SystemExit(f"{name} did not start")


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    with urllib.request.urlopen(url + "/v1/completions", json.dumps(body).encode()) as reply:
        result: dict[str, Any] = json.loads(reply.read())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    rng = random.Random(5)
    sides = [start("prefill", 0), start("decode", 1)]
    head = [rng.randrange(1000, 40000) for _ in range(arguments.tokens - 8)]
    times, size = [], 0
    for _ in range(arguments.runs):
        prompt = head + [rng.randrange(1000, 40000) for _ in range(8)]
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, "include_stats": True}
        asked = {"do_remote_decode": True}
        first = post(sides[0][1], {**body, "max_tokens": 1, "kv_transfer_params": asked})
        params = first["kv_transfer_params"]
        salt = str(rng.random())  # else the prefix is here from the run before
        reply = post(sides[1][1], {**body, "max_tokens": 2, "kv_transfer_params": params, "cache_salt": salt})
        stats = reply["stats"][0]
        assert stats["transfer_bytes"] > 0 and stats["cached_tokens"] == arguments.tokens - 1
        times.append(stats["transfer_s"])
        size = stats["transfer_bytes"]
    ordered = sorted(times)
    print(
        f"{arguments.tokens} tokens, {size} bytes: median {statistics.median(times) * 1e3:.1f} ms, "
        f"[{ordered[0] * 1e3:.1f}-{ordered[-1] * 1e3:.1f}]"
    )
    for child, _ in sides:
        child.terminate()
        child.wait()


if __name__ == "__main__":
    main()
