"""Three tiers at 120 % of what the fleet sustains: who keeps its SLO, who waits, and what is lost in throughput.

    python benchmarks/tiers.py --seeds 901 902 903

Eight instances; interactive chat, standard reasoning and batch documents, Poisson, at 1.2 times the rate at which the
offered tokens equal the fleet's budget (chat and reasoning alone are about half of it). `calibrated` holds by tier with
an ageing bound for batch; `least_tokens` dispatches at once, first come first served. Throughput is tokens computed
(prompts and outputs of requests that ended well) per second over the arrival time.

A second case has so many standard requests that these and the interactive ones alone are more than the fleet can do,
for two minutes, six times the ageing bound of batch there: what batch gets, it gets by ageing. The rule is that one of
four requests sent is an aged one while there are any, oldest first. So of the requests sent between the moment when one
has aged and when it goes itself at most four fall on each aged one before it and on itself. `sent in excess` counts
what goes beyond that and must be 0.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weighbridge.core.actions import Action, Dispatch
from weighbridge.core.events import Event
from weighbridge.core.metrics import RequestRecord
from weighbridge.core.request import Tier
from weighbridge.sim import fleet as fleets
from weighbridge.sim.runs import Generated, Run, few_collections, make_simulation
from weighbridge.workload.arrivals import Poisson
from weighbridge.workload.mixes import CHAT, DOCUMENT, REASONING
from weighbridge.workload.synthetic import Synthetic


@dataclass(frozen=True)
class Case:
    """Shares of interactive, standard and batch requests, how many arrive per second, and when batch is aged."""

    shares: tuple[float, float, float]
    rate: float
    ageing_s: float

    def tiers(self) -> tuple[Tier, Tier, Tier]:
        return (
            Tier(name="interactive", priority=0, ttft_s=0.5, may_preempt=True, sheddable=False),
            Tier(name="standard", priority=10, e2e_s=60.0),
            Tier(name="batch", priority=20, max_wait_s=self.ageing_s, sheddable=False),
        )

    def run(self, policy: str, seed: int, seconds: float) -> Run:
        classes = tuple(
            replace(kind, weight=share, tier=tier.name)
            for kind, share, tier in zip((CHAT, REASONING, DOCUMENT), self.shares, self.tiers(), strict=True)
        )
        return Run(
            fleet=fleets.mixed(8),
            workload=Generated(Synthetic(Poisson(self.rate), classes), duration_s=seconds),
            policy=policy,
            seed=seed,
            tiers=self.tiers(),
            label="tiers",
        )


CASES = {
    "120 %, half of it batch": Case((0.45, 0.10, 0.45), 64.0, 60.0),
    "urgent alone above capacity": Case((0.55, 0.40, 0.05), 115.0, 20.0),
}
TURN = 4
"""One of so many sent is an aged one."""
SLACK = 1
"""The turn that was under way when it aged."""


def attained(records: list[RequestRecord], tier: Tier) -> float:
    mine = [r for r in records if r.tier == tier.name]
    return 100 * sum(r.meets(tier) for r in mine) / len(mine)


def simulate(one: Run) -> tuple[list[RequestRecord], dict[str, float]]:
    """The records of a run, and when each request was sent, by its id."""
    simulation = make_simulation(one)
    handle = simulation.router.handle
    sent: dict[str, float] = {}

    def noting(event: Event, now_s: float) -> list[Action]:
        actions = handle(event, now_s)
        for action in actions:
            if isinstance(action, Dispatch):
                sent.setdefault(action.request_id, now_s)
        return actions

    simulation.router.handle = noting  # type: ignore[method-assign]
    with few_collections():
        return simulation.run(one.workload.requests(one.seed)), sent


def excess(records: list[RequestRecord], sent_s: dict[str, float], ageing_s: float) -> int:
    """The most requests by which the stated order was exceeded for any aged one; 0 where it was kept."""
    sent = sorted(sent_s.values())
    batch = sorted((r.scheduled_s, sent_s[r.id]) for r in records if r.tier == "batch" and r.id in sent_s)
    most = 0
    for n, (arrived_s, went_s) in enumerate(batch):
        aged_s = arrived_s + ageing_s
        if went_s <= aged_s:
            continue
        before = sum(other_s > aged_s for _, other_s in batch[:n] if other_s <= went_s)
        between = bisect_left(sent, went_s) - bisect_right(sent, aged_s)
        most = max(most, between - TURN * (before + SLACK))
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[901, 902, 903])
    parser.add_argument("--seconds", type=float, default=120.0)
    arguments = parser.parse_args()
    print("| case | policy | interactive % | standard % | batch served % | longest batch wait s, ageing at | "
          "batch sent aged % | sent in excess | tokens/s within the arrivals |\n" + "|---" * 9 + "|")  # fmt: skip
    for name, case in CASES.items():
        for policy in ("least_tokens", "calibrated"):
            rows = []
            for seed in arguments.seeds:
                records, sent = simulate(case.run(policy, seed, arguments.seconds))
                rows.append(figures(records, sent, case, arguments.seconds))
            met, standard, served, aged, tokens = (fmean(r[k] for r in rows) for k in range(5))
            longest, over = (max(r[k] for r in rows) for k in (5, 6))
            print(
                f"| {name} | {policy} | {met:.1f} | {standard:.1f} | {served:.1f} | {longest:.1f}, {case.ageing_s:g} | "
                f"{aged:.0f} | {over:.0f} | {tokens:,.0f} |", flush=True,
            )  # fmt: skip


def figures(records: list[RequestRecord], sent: dict[str, float], case: Case, seconds: float) -> tuple[float, ...]:
    """Per cent of interactive and standard that met their bounds, of batch served, of batch sent aged; tokens/s; the
    longest wait of a batch request until it was sent; requests sent in excess of the ageing order."""
    tiers = case.tiers()
    batch = [r for r in records if r.tier == "batch"]
    waits = [sent[r.id] - r.scheduled_s for r in batch if r.id in sent]
    done = [r for r in records if r.status == "ok" and r.last_token_s is not None and r.last_token_s <= seconds]
    return (
        attained(records, tiers[0]),
        attained(records, tiers[1]),
        100 * sum(r.status == "ok" for r in batch) / len(batch),
        100 * sum(wait > case.ageing_s for wait in waits) / len(batch),
        sum(r.prompt_tokens + r.output_tokens for r in done) / seconds,
        max(waits),
        float(excess(records, sent, case.ageing_s)),
    )


if __name__ == "__main__":
    main()
