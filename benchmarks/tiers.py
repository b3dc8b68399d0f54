"""Three tiers at 120 % of what the fleet sustains: who keeps its SLO, who waits, and what is lost in throughput.

    python benchmarks/tiers.py --seeds 901 902 903

Eight instances; interactive chat, standard reasoning and batch documents, Poisson, at 1.2 times the rate at which the
offered tokens equal the fleet's budget (chat and reasoning alone are about half of it). `calibrated` holds by tier with
an ageing bound for batch; `least_tokens` dispatches at once, first come first served. Throughput is tokens computed
(prompts and outputs of requests that ended well) per second over the arrival time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weighbridge.core.metrics import RequestRecord
from weighbridge.core.request import Tier
from weighbridge.sim import fleet as fleets
from weighbridge.sim.runs import Generated, Run, run_with_records
from weighbridge.workload.arrivals import Poisson
from weighbridge.workload.mixes import CHAT, DOCUMENT, REASONING
from weighbridge.workload.synthetic import Synthetic

AGEING_S = 60.0
TIERS = (
    Tier(name="interactive", priority=0, ttft_s=0.5, may_preempt=True, sheddable=False),
    Tier(name="standard", priority=10, e2e_s=60.0),
    Tier(name="batch", priority=20, max_wait_s=AGEING_S, sheddable=False),
)
CLASSES = (
    replace(CHAT, weight=0.45, tier="interactive"),
    replace(REASONING, weight=0.10, tier="standard"),
    replace(DOCUMENT, weight=0.45, tier="batch"),
)


def one(policy: str, seed: int, rate: float, seconds: float) -> Run:
    return Run(
        fleet=fleets.mixed(8),
        workload=Generated(Synthetic(Poisson(rate), CLASSES), duration_s=seconds),
        policy=policy,
        seed=seed,
        tiers=TIERS,
        label="tiers",
    )


def attained(records: list[RequestRecord], tier: Tier) -> float:
    mine = [r for r in records if r.tier == tier.name]
    return 100 * sum(r.meets(tier) for r in mine) / len(mine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[901, 902, 903])
    parser.add_argument("--rate", type=float, default=64.0)
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    print(
        "| policy | interactive % | standard % | batch served % | longest batch TTFT s | tokens/s within the arrivals |"
    )
    print("|---|---|---|---|---|---|")
    for policy in ("least_tokens", "calibrated"):
        rows = []
        for seed in arguments.seeds:
            _, records = run_with_records(one(policy, seed, arguments.rate, arguments.seconds))
            batch = [r for r in records if r.tier == "batch"]
            done = [
                r
                for r in records
                if r.status == "ok" and r.last_token_s is not None and r.last_token_s <= arguments.seconds
            ]
            rows.append(
                (
                    attained(records, TIERS[0]),
                    attained(records, TIERS[1]),
                    100 * sum(r.status == "ok" for r in batch) / len(batch),
                    max(r.ttft_s or 0.0 for r in batch),
                    sum(r.prompt_tokens + r.output_tokens for r in done) / arguments.seconds,
                )
            )
        mean = [fmean(column) for column in zip(*rows, strict=True)]
        print(
            f"| {policy} | {mean[0]:.1f} | {mean[1]:.1f} | {mean[2]:.1f} | {mean[3]:.0f} | {mean[4]:,.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
