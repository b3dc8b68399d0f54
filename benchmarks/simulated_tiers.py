"""The simulated twin of `real_tiers.py`: the same requests on two simulated engines with step times as measured here.

    python benchmarks/simulated_tiers.py --seeds 1 2 3

Steps are those of an embedded engine with one thread and the default model, as `weighbridge calibrate` finds them.
Prints a Markdown table of the share of requests with bounds that met them, and paired differences to the first policy.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.real_tiers import MIX, requests
from weighbridge.core.instance import StepTerms
from weighbridge.core.request import Tier
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.fleet import SimulatedFleet, SimulatedInstance
from weighbridge.sim.runs import Run, run_with_records
from weighbridge.workload.trace import TraceRequest

STAIRS = ((1, 0.0016), (2, 0.0138), (3, 0.026), (4, 0.0265), (5, 0.039), (6, 0.051), (7, 0.063), (8, 0.0645))
STEP = StepTerms(base_s=0.0105, prefill_s=0.00556, sequence_s=0.0081, kv_s=8.6e-6, sequence_knots=STAIRS)
ENGINE = SchedulerConfig(
    token_budget=512,
    max_sequences=8,
    blocks=1024,
    mixing="split",
    prefill_rows=64,
    busy_prefill_tokens=64,
    preemption="swap",
)
TIERS = (
    Tier(name="interactive", priority=0, ttft_s=MIX[0][4], tpot_s=MIX[0][5], sheddable=False),
    Tier(name="standard", priority=10, ttft_s=MIX[1][4], tpot_s=MIX[1][5]),
    Tier(name="batch", priority=20, max_wait_s=60),
)
TEMPLATE_TOKENS = 4


@dataclass(frozen=True)
class Given:
    """A workload of exactly these requests."""

    made: tuple[TraceRequest, ...]

    def requests(self, seed: int) -> list[TraceRequest]:
        return list(self.made)


def attainment(policy: str, seed: int, rate: float, seconds: float) -> float:
    """Share of the requests with bounds that met them."""
    made = tuple(
        TraceRequest(arrival_s=at, prompt_tokens=len(text.split()) + TEMPLATE_TOKENS, output_tokens=tokens, tier=tier)
        for at, tier, text, tokens in requests(seed, rate, seconds)
    )
    fleet = SimulatedFleet(tuple(SimulatedInstance(name, STEP, ENGINE, priorities=True) for name in "ab"))
    _, records = run_with_records(Run(fleet=fleet, workload=Given(made), policy=policy, seed=seed, tiers=TIERS))
    tiers = {tier.name: tier for tier in TIERS}
    return fmean(r.status == "ok" and r.meets(tiers[r.tier]) for r in records if r.tier != "batch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="calibrated,least_tokens,drain_time")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rate", type=float, default=1.6)
    parser.add_argument("--seconds", type=float, default=45.0)
    arguments = parser.parse_args()
    rows: dict[str, list[float]] = {}
    print("| policy | bounds met % | behind the first, points |\n|---|---|---|")
    for policy in arguments.policies.split(","):
        own = [100 * attainment(policy, seed, arguments.rate, arguments.seconds) for seed in arguments.seeds]
        rows[policy] = own
        gaps = [a - b for a, b in zip(next(iter(rows.values())), own, strict=True)]
        error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        print(f"| {policy} | {fmean(own):.1f} ({min(own):.0f} to {max(own):.0f}) | {fmean(gaps):+.1f} ± {error:.1f} |")


if __name__ == "__main__":
    main()
