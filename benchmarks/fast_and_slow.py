"""One fast engine and one throttled to a sixth in decode and a 35th in prefill: are both together better than the fast?

    python benchmarks/fast_and_slow.py --out results.json

Real embedded engines behind a real `weighbridge serve --policy calibrated`. 8 and 48 requests, 50 ms apart, all with
one prompt of 516 tokens that is in both caches (`--ending varied`: their last word differs), exactly 128 output tokens,
at most 4 at a time on each engine. The arm `fast` drains the slow engine first; arms alternate within one
server. Then, `--cold COUNT`, requests that share nothing. Prints a Markdown table; fails if a request does not end well
with its exact length.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from benchmarks.ask import ask
from tests.support.served import Served, serve
from weighbridge.core.instance import Rates
from weighbridge.cost.profile import decode_profile, encode_profile
from weighbridge.http.client import HttpClient

WORDS = ("river", "house", "green", "seven", "cloud", "paper", "stone", "light", "field", "music", "water", "north")
PREFIX_WORDS, OUTPUT, GAP_S, SLOTS = 514, 128, 0.05, 4
PREFILL, DECODE = 35.0, 6.0
"""How many times slower the slow one is."""


def text(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(PREFIX_WORDS))


async def burst(served: Served, prompts: list[str], tier: str) -> dict[str, Any]:
    client, jobs = HttpClient(), []
    for prompt in prompts:
        jobs.append(asyncio.create_task(ask(client, served.url, prompt, OUTPUT, tier)))
        await asyncio.sleep(GAP_S)
    done = await asyncio.gather(*jobs)
    await client.close()
    served.wait_idle()
    begun = min(d.sent_s for d in done)
    e2e = sorted(d.e2e_s for d in done)
    ttft = sorted(d.ttft_s for d in done)
    last = max(len(done) * 95 // 100 - 1, 0) if len(done) > 20 else len(done) - 1
    return {
        "completion_s": max(d.sent_s + d.e2e_s for d in done) - begun,
        "mean_e2e_s": sum(e2e) / len(e2e),
        "ttft_p50_s": median(ttft),
        "ttft_p95_s": ttft[last],
        "slow": [n + 1 for n, d in enumerate(done) if d.instance == "slow"],
        "slow_s": [[round(d.sent_s + s - begun, 2) for s in (d.ttft_s, d.e2e_s)] for d in done if d.instance == "slow"],
        "fast_done_s": max((d.sent_s + d.e2e_s - begun for d in done if d.instance == "fast"), default=0.0),
        "prompt_tokens": done[0].prompt_tokens,
    }


def profiles(folder: Path) -> None:
    """Profiles of both engines: the fast one's own probe at its start, and the same with the throttle's factors."""
    config = folder / "probe.yaml"
    config.write_text(f"engines:\n  - {{name: fast, threads: 1, slots: {SLOTS}, profile: {folder}/probed.json}}\n")
    with serve(folder, "--config", str(config)):
        pass
    probed = decode_profile((folder / "probed.json").read_bytes(), "probed.json")
    assert probed.rates is not None and probed.step is not None
    for name, p, d in (("fast", 1.0, 1.0), ("slow", PREFILL, DECODE)):
        step = msgspec.structs.replace(
            probed.step,
            base_s=probed.step.base_s * d,
            sequence_s=probed.step.sequence_s * d,
            sequence_knots=tuple((count, seconds * d) for count, seconds in probed.step.sequence_knots),
            kv_s=probed.step.kv_s * d,
            prefill_s=probed.step.prefill_s * p,
        )
        rates = Rates(
            prefill_tokens_per_s=probed.rates.prefill_tokens_per_s / p,
            decode_tokens_per_s=probed.rates.decode_tokens_per_s / d,
        )
        made = msgspec.structs.replace(probed, rates=rates, step=step)
        (folder / f"{name}.json").write_bytes(encode_profile(made))
        print(name, rates, step, flush=True)


def drain(served: Served, name: str, on: bool) -> None:
    verb = "drain" if on else "undrain"
    request = urllib.request.Request(f"{served.admin}/instances/{verb}?name={name}", method="POST", data=b"")
    urllib.request.urlopen(request, timeout=10).read()
    while (served.fleet()[name]["health"] == "up") is on:
        time.sleep(0.05)


def seed(served: Served, prompt: str, tier: str) -> None:
    """Put a prompt into both caches, through the gateway so that it knows."""
    for name, other in (("fast", "slow"), ("slow", "fast")):
        drain(served, other, True)
        done = asyncio.run(burst(served, [prompt], tier))
        assert done["slow"] == ([1] if name == "slow" else []), done
        drain(served, other, False)


def report(rows: list[dict[str, Any]]) -> None:
    """Print medians by count, prefix and arm."""
    print("| requests | prefix | arm | runs | completion s | mean E2E s | TTFT p50 / p95 s | to the slow one |")
    print("|---|---|---|---|---|---|---|---|")
    for key in dict.fromkeys((r["count"], r["prefix"], r["arm"]) for r in rows):
        own = [r for r in rows if (r["count"], r["prefix"], r["arm"]) == key]
        middle = {
            name: median(r[name] for r in own) for name in ("completion_s", "mean_e2e_s", "ttft_p50_s", "ttft_p95_s")
        }
        spread = f"{min(r['completion_s'] for r in own):.1f} to {max(r['completion_s'] for r in own):.1f}"
        print(
            f"| {key[0]} | {key[1]} | {key[2]} | {len(own)} | {middle['completion_s']:.1f} ({spread}) | "
            f"{middle['mean_e2e_s']:.1f} | {middle['ttft_p50_s']:.2f} / {middle['ttft_p95_s']:.2f} | "
            f"{', '.join(str(len(r['slow'])) for r in own)} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="calibrated")
    parser.add_argument("--tier", default="batch")
    parser.add_argument("--counts", type=int, nargs="+", default=[8, 48])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ending", choices=("same", "varied"), default="same")
    parser.add_argument("--cold", type=int, nargs="*", default=[8], metavar="COUNT")
    parser.add_argument("--cold-arms", nargs="+", choices=("fast", "both"), default=["fast", "both"])
    parser.add_argument("--budget-s", type=float, default=330.0, help="begin no further run after this long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    fresh = itertools.count(100)
    with tempfile.TemporaryDirectory() as folder:
        profiles(Path(folder))
        config = Path(folder) / "fleet.yaml"
        config.write_text(
            f"router: {{policy: {arguments.policy}}}\nhealth: {{slow_start_s: 0}}\nengines:\n"
            f"  - {{name: fast, threads: 1, slots: {SLOTS}, probe: false, profile: {folder}/fast.json}}\n"
            f"  - {{name: slow, threads: 1, slots: {SLOTS}, probe: false, profile: {folder}/slow.json, "
            f"throttle_prefill: {PREFILL:g}, throttle_decode: {DECODE:g}}}\n"
        )
        with serve(Path(folder), "--config", str(config)) as served:
            print(json.dumps(served.instances), flush=True)
            prompt = text(1)
            seed(served, prompt, arguments.tier)

            def measure(prefix: str, count: int, run: int, arm: str) -> None:
                if time.monotonic() - began > arguments.budget_s:
                    return
                if arm == "fast":
                    drain(served, "slow", True)
                if prefix == "cached":
                    asked = [f"{prompt} {n % 9}" if arguments.ending == "varied" else prompt for n in range(count)]
                else:
                    asked = [text(next(fresh)) for _ in range(count)]
                figures = asyncio.run(burst(served, asked, arguments.tier))
                if arm == "fast":
                    drain(served, "slow", False)
                rows.append({"count": count, "arm": arm, "run": run, "prefix": prefix, **figures})
                print(json.dumps(rows[-1]), flush=True)

            for run in range(arguments.runs):
                for count in arguments.counts:
                    for arm in ("fast", "both") if run % 2 == 0 else ("both", "fast"):
                        measure("cached", count, run, arm)
            for count in arguments.cold:
                for arm in arguments.cold_arms:
                    measure("cold", count, 0, arm)
            assert served.stop() == 0
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))
    report(rows)


if __name__ == "__main__":
    main()
