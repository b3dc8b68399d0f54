"""200 requests through `weighbridge serve`, half of the clients leaving at random points: counters, engines, memory.

    python benchmarks/cancels.py --count 200 --rounds 3

Prints one JSON object: how the requests ended, the ledger afterwards, the seconds until both engines were idle after
the last client had left, and the resident memory of gateway and engines before and after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.clients import half_cancelled
from tests.support.served import Served, engine_gauge, rss_bytes, serve


def engines_busy(served: Served) -> float:
    gauges = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(engine_gauge(i["url"], gauge) for i in served.instances for gauge in gauges)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rounds = []
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as served:
        pids = {"gateway": served.process.pid, **{i["name"]: i["pid"] for i in served.instances}}
        asyncio.run(half_cancelled(served, 40, 0))
        served.wait_idle()
        for number in range(arguments.rounds):
            before = {name: rss_bytes(pid) for name, pid in pids.items()}
            ends = asyncio.run(half_cancelled(served, arguments.count, number + 1))
            begun = time.monotonic()
            fleet = served.wait_idle()
            while engines_busy(served):
                time.sleep(0.01)
            idle_s = time.monotonic() - begun
            counters = ("in_flight", "prefill_tokens", "decode_tokens", "kv_tokens")
            rounds.append(
                {
                    "ends": {end: ends.count(end) for end in sorted(set(ends))},
                    "ledger": {name: [i[c] for c in counters] for name, i in fleet.items()},
                    "idle_after_s": round(idle_s, 3),
                    "rss_mb_before": {n: round(b / 1e6, 1) for n, b in before.items()},
                    "rss_mb_after": {n: round(rss_bytes(pid) / 1e6, 1) for n, pid in pids.items()},
                }
            )
    print(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
