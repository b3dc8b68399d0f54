"""What prefix caches save, what routing for them saves more, and when memory pressure takes it back.

Three workloads of equal size: conversations and documents that share long prefixes; the same texts with one different
token in the first block (similar, but nothing can be reused); unrelated ones. Then the KV memory is made scarce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from weighbridge.core.metrics import RequestRecord
from weighbridge.core.request import DEFAULT_TIERS, Tier
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.base import (
    Experiment,
    Options,
    Outcome,
    Panel,
    compare_policies,
    overall,
    paired,
    table,
    variant,
)
from weighbridge.sim.runs import Run, run_with_records
from weighbridge.workload.arrivals import Bursts
from weighbridge.workload.lengths import Lognormal
from weighbridge.workload.prefixes import PrefixLevel, PrefixTree, extend, mix64
from weighbridge.workload.synthetic import RequestClass, Synthetic
from weighbridge.workload.trace import TraceRequest

POLICIES = ("round_robin", "least_tokens", "prefix_affinity", "affinity_gate", "calibrated")
TIER = Tier(name="chat", priority=0, ttft_s=0.4, tpot_s=0.045)
RATES = {"shared": 220.0, "similar": 75.0, "unrelated": 75.0}
KINDS = tuple(RATES)


@dataclass(frozen=True, slots=True)
class Documents:
    """Questions about documents below a few system prompts: 1,600 to 2,000 shared tokens, about 150 of their own."""

    kind: str
    rate: float
    duration_s: float

    def requests(self, seed: int) -> list[TraceRequest]:
        tree = PrefixTree((PrefixLevel(4, 400), PrefixLevel(40, 1_400, skew=0.9)))
        chat = RequestClass("chat", 1.0, Lognormal(150, 0.6), Lognormal(120, 0.6), "chat")
        made = Synthetic(Bursts(self.rate), (chat,), prefixes=tree).generate(seed, duration_s=self.duration_s)
        if self.kind == "shared":
            return list(made)
        # `similar`: another first token changes the hash of the first block, and so of all that follow it.
        salt = 7_919 if self.kind == "similar" else 104_729
        return [
            msgspec.structs.replace(r, blocks=extend((), len(r.blocks), mix64(seed * salt + k)))
            for k, r in enumerate(made)
        ]


def make_run(kind: str, blocks: int, rate: float, duration_s: float, policy: str, seed: int) -> Run:
    """Eight equal instances with prefix caches of `blocks` blocks."""
    fleet = fleets.mixed(8, scheduler=SchedulerConfig(blocks=blocks, prefix_caching=True))
    one = Run(
        fleet=fleet,
        workload=Documents(kind, rate, duration_s),
        seed=seed,
        tiers=(TIER, *DEFAULT_TIERS),
        skip=0.05,
        label=f"{kind}/{blocks}",
    )
    return variant(one, policy)


def reuse(records: list[RequestRecord]) -> dict[str, float]:
    """Reused tokens as a share of all prompt tokens, and latencies."""
    done = [r for r in records if r.status == "ok"]
    ttft = sorted(r.ttft_s or 0.0 for r in done)
    return {
        "reused_share": sum(r.cached_tokens for r in done) / sum(r.prompt_tokens for r in done),
        "ttft_p50_s": ttft[len(ttft) // 2],
        "ttft_p99_s": ttft[int(0.99 * len(ttft))],
    }


def run(options: Options) -> Outcome:
    """Policies by kind of prefix, then by memory."""
    seeds = options.seed_list(2)
    duration = 5.0 if options.quick else 30.0
    make = {kind: partial(make_run, kind, 6_000, RATES[kind], duration) for kind in KINDS}
    by_trace = table(results := compare_policies(make, POLICIES, seeds, options))
    detail: dict[str, Any] = {}
    for kind in ("shared", "unrelated"):
        for policy in POLICIES:
            _, records = run_with_records(make[kind](policy, seeds[0]))
            detail[f"{kind}/{policy}"] = reuse(records)
    sizes = [700, 6_000] if options.quick else [1_200, 2_000, 4_000, 8_000]
    pressure: dict[str, list[float]] = {}
    for policy in ("least_tokens", "prefix_affinity", "calibrated"):
        for size in sizes:
            one = replace(make_run("shared", size, 0.6 * RATES["shared"], duration / 2, policy, seeds[0]), skip=0.1)
            _, records = run_with_records(one)
            pressure.setdefault(policy, []).append(reuse(records)["reused_share"])
    findings = [
        f"shared prefixes, {p}: {detail[f'shared/{p}']['reused_share']:.1%} of prompt tokens reused, TTFT p50 "
        f"{1e3 * detail[f'shared/{p}']['ttft_p50_s']:.0f} ms, attainment {100 * by_trace['shared'][p].mean:.1f} %"
        for p in POLICIES
    ]
    loses = []
    for kind in KINDS:
        best = max(by_trace[kind], key=lambda p: by_trace[kind][p].mean)
        gap = by_trace[kind][best].mean - by_trace[kind]["calibrated"].mean
        if gap > 0:
            loses.append(f"{kind}: {best} is {100 * gap:.1f} points above calibrated")
    findings.append(
        "similar and unrelated prompts reuse "
        f"{max(detail[f'unrelated/{p}']['reused_share'] for p in POLICIES):.1%}: a cache hit needs equal tokens"
    )
    return Outcome(
        experiment="prefix",
        quick=options.quick,
        seeds=seeds,
        attainment=overall(by_trace),
        by_trace=by_trace,
        differences=paired(results, "calibrated"),
        data={"detail": detail, "pressure": {"blocks": sizes, **pressure}},
        findings=findings,
        loses=loses,
        panels=[
            *(
                Panel(
                    title=f"{kind} prefixes",
                    x="attainment",
                    bars={p: v.mean for p, v in row.items()},
                    errors={p: v.standard_error or 0.0 for p, v in row.items()},
                )
                for kind, row in by_trace.items()
            ),
            Panel(
                title="reused share of prompt tokens by KV memory",
                x="blocks per instance",
                log_x=True,
                curves={p: ([float(s) for s in sizes], y) for p, y in pressure.items()},
            ),
        ],
    )


EXPERIMENT = Experiment("prefix", __doc__ or "", run)
