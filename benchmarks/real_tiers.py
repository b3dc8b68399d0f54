"""Bursts of three tiers on two equal engines, policy by policy, with the same requests at the same times.

    python benchmarks/real_tiers.py --out results.json

Real embedded engines behind a real `weighbridge serve`, a fresh one per policy. Interactive chat, standard answers and
batch documents arrive in bursts; the client judges each by its tier's bounds, and a refused one is a miss. Prints a
Markdown table; fails if a request ends in any other way than well or refused. Rate and bounds were chosen in simulation
on other seeds (`benchmarks/simulated_tiers.py`): about what two engines of one thread can do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.ask import Asked, ask
from tests.support.served import serve
from weighbridge.http.client import HttpClient
from weighbridge.workload.arrivals import Bursts

WORDS = ("river", "house", "green", "seven", "cloud", "paper", "stone", "light", "field", "music", "water", "north")
# tier, share, prompt words, output tokens, bounds on TTFT and TPOT in seconds
MIX = (
    ("interactive", 0.6, 50, 24, 1.5, 0.12),
    ("standard", 0.2, 80, 64, 4.0, 0.15),
    ("batch", 0.2, 320, 32, None, None),
)
TIERS = """
    - {name: interactive, priority: 0, ttft_s: 1.5, tpot_s: 0.12, sheddable: false}
    - {name: standard, priority: 10, ttft_s: 4.0, tpot_s: 0.15}
    - {name: batch, priority: 20, max_wait_s: 60}
"""


def requests(seed: int, rate: float, seconds: float) -> list[tuple[float, str, str, int]]:
    draw = random.Random(seed)
    made = []
    for at in Bursts(rate).times(random.Random(seed + 1)):
        if at > seconds:
            return made
        tier, _, words, tokens, *_ = draw.choices(MIX, [m[1] for m in MIX])[0]
        text = " ".join(draw.choice(WORDS) for _ in range(max(round(words * draw.lognormvariate(0.0, 0.4)), 5)))
        made.append((at, tier, text, max(round(tokens * draw.lognormvariate(0.0, 0.4)), 4)))
    return made


async def play(url: str, plan: list[tuple[float, str, str, int]]) -> list[Asked]:
    client, jobs, begun = HttpClient(), [], time.perf_counter()
    for at, tier, text, tokens in plan:
        await asyncio.sleep(max(begun + at - time.perf_counter(), 0.0))
        jobs.append(asyncio.create_task(ask(client, url, text, tokens, tier, may_refuse=True)))
    done = await asyncio.gather(*jobs)
    await client.close()
    return list(done)


def met(one: Asked) -> bool:
    ttft, tpot = next((m[4], m[5]) for m in MIX if m[0] == one.tier)
    if one.refused:
        return False
    pace = (one.e2e_s - one.ttft_s) / max(one.output_tokens - 1, 1)
    return (ttft is None or one.ttft_s <= ttft) and (tpot is None or pace <= tpot)


def figures(done: list[Asked]) -> dict[str, Any]:
    bound = [d for d in done if d.tier != "batch"]
    ttft = sorted(d.ttft_s for d in bound if not d.refused)
    return {
        "attainment": fmean(met(d) for d in bound),
        **{tier: fmean([met(d) for d in done if d.tier == tier] or [1.0]) for tier, *_ in MIX},
        "ttft_p99_s": ttft[int(0.99 * len(ttft))] if ttft else 0.0,
        "refused": sum(d.refused > 0 for d in done),
        "requests": len(done),
        "last_s": max(d.sent_s + d.e2e_s for d in done) - min(d.sent_s for d in done),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="calibrated,least_tokens,drain_time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=1.6)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for policy in arguments.policies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "fleet.yaml"
            config.write_text(
                f"router:\n  policy: {policy}\n  tiers:{TIERS}health: {{slow_start_s: 0}}\nengines:\n"
                "  - {name: a, threads: 1, slots: 8}\n  - {name: b, threads: 1, slots: 8}\n"
            )
            with serve(Path(folder), "--config", str(config)) as served:
                asyncio.run(play(served.url, requests(99, 2.0, 3.0)))  # the first requests of an engine are slow
                served.wait_idle()
                for seed in arguments.seeds:
                    done = asyncio.run(play(served.url, requests(seed, arguments.rate, arguments.seconds)))
                    served.wait_idle()
                    rows.append({"policy": policy, "seed": seed, **figures(done)})
                    print(json.dumps(rows[-1]), flush=True)
                assert served.stop() == 0
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    ours = {r["seed"]: r["attainment"] for r in rows if r["policy"] == arguments.policies.split(",")[0]}
    print("| policy | bounds met % | interactive % | standard % | P99 TTFT s | refused | behind the first, points |")
    print("|---|---|---|---|---|---|---|")
    for policy in arguments.policies.split(","):
        own = [r for r in rows if r["policy"] == policy]
        gaps = [100 * (ours[r["seed"]] - r["attainment"]) for r in own]
        error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        mean = {k: fmean(r[k] for r in own) for k in ("attainment", "interactive", "standard", "ttft_p99_s", "refused")}
        print(
            f"| {policy} | {100 * mean['attainment']:.1f} | {100 * mean['interactive']:.1f} | "
            f"{100 * mean['standard']:.1f} | {mean['ttft_p99_s']:.2f} | {mean['refused']:.1f} | "
            f"{fmean(gaps):+.1f} ± {error:.1f} |"
        )


if __name__ == "__main__":
    main()
