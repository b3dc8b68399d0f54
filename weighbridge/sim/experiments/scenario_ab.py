"""Ten short requests or ten long ones on one engine look alike to a request counter, and are not.

A: 10 requests of about 50 tokens decode about 10 tokens a step and leave the budget of 512 idle. B: 10 of about 2,000
exhaust the KV memory at 6 sequences, and 4 wait. Then both at once on two engines, routed by counts or by tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.base import Experiment, Options, Outcome, Panel
from weighbridge.sim.instance import SimInstance
from weighbridge.sim.job import StepSpan
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.runs import Run, run_with_records
from weighbridge.workload.streams import Streams
from weighbridge.workload.trace import TraceRequest

# 6 sequences of 2,000 tokens fill it.
CONFIG = SchedulerConfig(token_budget=512, blocks=6 * 125 + 30, admission="reserve")
POLICIES = ("round_robin", "least_requests", "prompt_length", "least_tokens", "kv_free", "work")


@dataclass(frozen=True, slots=True)
class Alike:
    """`count` requests at once of prompt and output tokens each."""

    count: int
    prompt: int
    output: int

    def requests(self, seed: int) -> list[TraceRequest]:
        return [TraceRequest(0.0, self.prompt, self.output) for _ in range(self.count)]


@dataclass(frozen=True, slots=True)
class ShortAndLong:
    """Short and long requests alternate at random, at `rate` requests per second."""

    rate: float
    duration_s: float

    def requests(self, seed: int) -> list[TraceRequest]:
        rng, kinds = Streams(seed).get("arrivals"), Streams(seed).get("class")
        out, now = [], 0.0
        while (now := now + rng.expovariate(self.rate)) < self.duration_s:
            long = kinds.random() < 0.3
            out.append(TraceRequest(now, 1_600 if long else 30, 400 if long else 20, kind="long" if long else "short"))
        return out


def watch(workload: Alike) -> dict[str, float]:
    """Step composition of one engine while the requests run."""
    spans: list[StepSpan] = []

    def record(instance: SimInstance, span: StepSpan) -> None:
        spans.append(span)

    fleet = fleets.mixed(1, scheduler=CONFIG)
    settings = SimulationSettings(max_tokens=None)
    result, _ = run_with_records(Run(fleet=fleet, workload=workload, settings=settings), on_step=record)
    decoding = [s for s in spans if s.decodes and not s.prefill_tokens]
    steps = sum(s.steps for s in decoding)
    return {
        "decode_tokens_per_step": sum(s.decodes * s.steps for s in decoding) / steps,
        "most_running": float(max(s.decodes for s in spans)),
        "most_waiting": float(max(s.waiting for s in decoding)),
        "budget_used": sum(s.decodes * s.steps for s in decoding) / steps / CONFIG.token_budget,
        "tokens": float(workload.count * (workload.prompt + workload.output)),
        "e2e_mean_s": result.summary.e2e_s.mean,
        "output_tokens_per_s_per_request": workload.output / result.summary.e2e_s.mean,
    }


def run(options: Options) -> Outcome:
    """Both scenarios alone, then the mixture by router."""
    a, b = watch(Alike(10, 30, 20)), watch(Alike(10, 1_600, 400))
    seeds = options.seed_list(2)
    duration = 30.0 if options.quick else 60.0
    rows = {}
    for policy in POLICIES:
        spreads, p99 = [], []
        for seed in seeds:
            one = Run(
                fleet=fleets.mixed(4, scheduler=replace(CONFIG, token_budget=2_048)),
                workload=ShortAndLong(11.0, duration),
                policy=policy,
                seed=seed,
                settings=SimulationSettings(max_tokens=None),
                router={"dispatch": "immediate"},
            )
            _, records = run_with_records(one)
            short = sorted(r.e2e_s for r in records if r.prompt_tokens == 30 and r.e2e_s is not None)
            spreads.append(short[int(0.99 * len(short))] / short[len(short) // 2])
            p99.append(short[int(0.99 * len(short))])
        rows[policy] = {"p99_over_p50": sum(spreads) / len(spreads), "p99_s": sum(p99) / len(p99)}
    findings = [
        f"A: {a['decode_tokens_per_step']:.1f} decode tokens a step, {a['budget_used']:.1%} of the budget; "
        f"{a['most_waiting']:.0f} wait once all are in",
        f"B: KV is full at {b['most_running']:.0f} sequences, {b['most_waiting']:.0f} wait; "
        f"{b['tokens'] / a['tokens']:.0f} times the work of A for the same number of requests",
        "short requests among long ones on 4 engines, P99 / P50 of completion: "
        + ", ".join(f"{p} {row['p99_over_p50']:.1f}" for p, row in rows.items()),
    ]
    return Outcome(
        experiment="scenario-ab",
        quick=options.quick,
        seeds=seeds,
        data={"A": a, "B": b, "spread": rows},
        findings=findings,
        panels=[
            Panel(
                title="running at most (KV bounds B)",
                bars={"A": a["most_running"], "B": b["most_running"]},
                x="sequences",
            ),
            Panel(
                title="short requests among long: P99 / P50 of completion",
                x="ratio",
                bars={p: row["p99_over_p50"] for p, row in rows.items()},
            ),
        ],
    )


EXPERIMENT = Experiment("scenario-ab", __doc__ or "", run)
