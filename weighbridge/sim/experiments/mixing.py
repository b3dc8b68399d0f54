"""Which ways of filling a step are throughput-optimal, and what does not mixing cost?

Every mixer serves the same engine. Throughput is measured on a backlog (all requests there from the start), stability
by the growth of the backlog at rates up to what the mixed scheduler sustains.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weighbridge.scheduling.mixing import Mixing
from weighbridge.sim import fleet as fleets
from weighbridge.sim.experiments.base import Experiment, Options, Outcome, Panel
from weighbridge.sim.experiments.stability import growth
from weighbridge.sim.runs import Generated, Run, run_with_records
from weighbridge.workload.arrivals import Constant, Poisson
from weighbridge.workload.lengths import Exponential
from weighbridge.workload.synthetic import RequestClass, Synthetic

MIXERS: dict[Mixing, str] = {
    "mixed": "Sarathi-Serve, vLLM today",
    "prefill_first_mixed": "Orca as stylised: prefill first, then decodes",
    "whole": "whole prompts with the decodes",
    "prefill_first": "vLLM before chunked prefill",
    "decode_first": "decodes alone, prefill when none decodes",
    "request_level": "FasterTransformer: a batch to its end",
}
BUDGET, SEQUENCES = 512, 64
# What does not cut prompts batches as many whole ones as its engine takes: a budget of 512 would starve it unfairly.
BUDGETS: dict[str, int] = {"prefill_first": 2_048, "decode_first": 64 * 300, "request_level": 64 * 300}


def make_run(mixing: Mixing, rate: float, duration_s: float, seed: int, output: float, *, backlog: bool = False) -> Run:
    """One engine of a small budget; `backlog` brings everything in the first second."""
    arrivals = Constant(rate * duration_s) if backlog else Poisson(rate)
    work = Synthetic(arrivals, (RequestClass("", 1.0, Exponential(300.0), Exponential(output)),))
    fleet = fleets.mixed(1, blocks=12_000)
    config = replace(
        fleet.instances[0].scheduler, mixing=mixing, token_budget=BUDGETS.get(mixing, BUDGET), max_sequences=SEQUENCES
    )
    count = max(1, round(rate * duration_s))
    generated = Generated(work, count=count) if backlog else Generated(work, duration_s=duration_s)
    return Run(fleet=fleet.changed(scheduler=config), workload=generated, seed=seed, assign="fixed")


def throughput(one: Run) -> dict[str, float]:
    """Requests and tokens per second until everything is done, and how full steps were."""
    result, records = run_with_records(one)
    span = max(r.last_token_s or 0.0 for r in records)
    tokens = sum(r.prompt_tokens + r.output_tokens for r in records)
    return {
        "requests_per_s": len(records) / span,
        "tokens_per_s": tokens / span,
        "fill": tokens / result.steps / BUDGET,
        "tpot_p99_s": result.summary.tpot_s.p99,
        "ttft_p50_s": result.summary.ttft_s.p50,
    }


def run(options: Options) -> Outcome:
    """Throughput by mixer and mix of work, then stability along the rate."""
    seed = options.seed_list()[0]
    duration = 20.0 if options.quick else 100.0
    outputs = [30.0, 300.0]
    loss: dict[str, dict[str, float]] = {}
    data: dict[str, Any] = {"decodes_alone_fill": 8 / 512}
    findings = []
    sustained = {}
    for output in outputs:
        key = f"300 in / {output:.0f} out"
        rows = {m: throughput(make_run(m, 20.0, duration / 2, seed, output, backlog=True)) for m in MIXERS}
        data[key] = rows
        sustained[output] = rows["mixed"]["requests_per_s"]
        loss[key] = {m: 1.0 - row["requests_per_s"] / rows["mixed"]["requests_per_s"] for m, row in rows.items()}
        worst = max(loss[key], key=lambda m: loss[key][m])
        text = ", ".join(f"{m} {value:.0%}" for m, value in loss[key].items() if m != "mixed")
        findings.append(f"{key}: loss of throughput against mixed: {text} (most: {worst})")
    shares = [0.6, 0.95] if options.quick else [0.4, 0.6, 0.8, 0.9, 0.95]
    grows: dict[str, tuple[list[float], list[float]]] = {}
    for mixing in MIXERS:
        slopes = []
        for share in shares:
            _, records = run_with_records(make_run(mixing, sustained[30.0] * share, duration, seed, 30.0))
            slopes.append(growth(records, duration) / (sustained[30.0] * share))
        grows[mixing] = (shares, slopes)
        if slopes[-1] > 0.02:
            first = next(share for share, slope in zip(shares, slopes, strict=True) if slope > 0.02)
            findings.append(f"{mixing} ({MIXERS[mixing]}): backlog grows from {first:.0%} of what mixed sustains")
        else:
            findings.append(f"{mixing} ({MIXERS[mixing]}): stable up to {shares[-1]:.0%} of what mixed sustains")
    findings.append(
        f"8 decodes in a budget of 512 fill {8 / 512:.2%} of it: 504 slots are open to prefill in every such step"
    )
    return Outcome(
        experiment="mixing",
        quick=options.quick,
        seeds=[seed],
        data={**data, "loss": loss, "growth": {m: slopes for m, (_, slopes) in grows.items()}, "shares": shares},
        findings=findings,
        panels=[
            *(Panel(title=f"lost throughput, {key}", x="share", bars=row) for key, row in loss.items()),
            Panel(
                title="growth of the backlog (300 in / 30 out), share of arrivals",
                x="rate / what mixed sustains",
                curves=grows,
            ),
        ],
    )


EXPERIMENT = Experiment("mixing", __doc__ or "", run)
