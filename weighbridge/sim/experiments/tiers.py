"""One engine at 120 % load with three tiers; what do order, preemption and swapping do for each?

The engine's own scheduler does the work here: disciplines, priority numbers with ageing, and preemption of running
batch sequences by recompute or by swap. Throughput is compared with first come, first served.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weighbridge.core.metrics import RequestRecord
from weighbridge.core.request import Tier
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim import fleet as fleets
from weighbridge.sim.cost_runner import CostRunner
from weighbridge.sim.experiments.base import Experiment, Options, Outcome, Panel
from weighbridge.sim.experiments.stability import predicted_rate
from weighbridge.sim.fixed import advance_until
from weighbridge.sim.instance import make_instance
from weighbridge.sim.job import Job
from weighbridge.workload.arrivals import Bursts
from weighbridge.workload.lengths import Exponential, Lognormal
from weighbridge.workload.synthetic import RequestClass, Synthetic

TIERS = {
    "interactive": Tier(name="interactive", priority=0, ttft_s=0.5),
    "standard": Tier(name="standard", priority=1, e2e_s=20.0),
    "batch": Tier(name="batch", priority=2),
}
CLASSES = (
    RequestClass("interactive", 0.45, Lognormal(250, 0.7), Lognormal(120, 0.6), "interactive"),
    RequestClass("standard", 0.30, Exponential(600.0), Exponential(200.0), "standard"),
    RequestClass("batch", 0.25, Exponential(1_200.0), Exponential(500.0), "batch"),
)
PROMPT = sum(c.weight * c.prompt.mean for c in CLASSES)
OUTPUT = sum(c.weight * c.output.mean for c in CLASSES)
BASE = SchedulerConfig(blocks=3_000)
SWAP_S_PER_TOKEN = 131_072 / 25e9  # 128 KiB of KV per token over PCIe 4.0 x16
ARMS: dict[str, dict[str, Any]] = {
    "fcfs": {},
    "spf": {"discipline": "spf"},
    "sjf": {"discipline": "sjf"},
    "fair": {"discipline": "fair"},
    "priority": {"discipline": "priority"},
    "priority, ageing 30 s": {"discipline": "priority", "ageing_s": 30.0},
    "priority, preempt by recompute": {"discipline": "priority", "preempt_priority": True},
    "priority, preempt by swap": {
        "discipline": "priority",
        "preempt_priority": True,
        "preemption": "swap",
        "swap_s_per_token": SWAP_S_PER_TOKEN,
    },
    "unmixed fcfs": {"mixing": "prefill_first"},
    "unmixed priority": {"mixing": "prefill_first", "discipline": "priority"},
}


def serve(config: SchedulerConfig, rate: float, duration_s: float, seed: int) -> dict[str, Any]:
    """The tiers' figures on one engine; tenants are the tiers, for the fair discipline."""
    instance = make_instance("i0", config, CostRunner(fleets.RTX_PRO_6000, token_budget=config.token_budget))
    records = []
    for number, request in enumerate(Synthetic(Bursts(rate), CLASSES).generate(seed, duration_s=duration_s)):
        advance_until(instance, request.arrival_s)
        tier = TIERS[request.tier]
        record = RequestRecord(
            id=f"r{number}", scheduled_s=request.arrival_s, status="unfinished", tier=request.tier,
            prompt_tokens=request.prompt_tokens,
        )  # fmt: skip
        records.append(record)
        job = Job(
            record.id, request.prompt_tokens, request.output_tokens, record, priority=tier.priority, tenant=tier.name
        )
        instance.add(job, request.arrival_s)
    within = [r for r in records if r.scheduled_s <= duration_s]
    done = sum(r.prompt_tokens + r.output_tokens for r in records if r.last_token_s and r.last_token_s <= duration_s)
    advance_until(instance, float("inf"))
    waits = {tier: [r.ttft_s or 0.0 for r in within if r.tier == tier] for tier in TIERS}
    return {
        "attainment": {t: sum(r.meets(TIERS[t]) for r in within if r.tier == t) / len(waits[t]) for t in TIERS},
        "ttft_p99_s": {t: sorted(w)[int(0.99 * len(w))] for t, w in waits.items()},
        "longest_wait_s": {t: max(w) for t, w in waits.items()},
        "tokens_per_s": sum(r.prompt_tokens + r.output_tokens for r in records)
        / max(r.last_token_s or 0.0 for r in records),
        "tokens_done_in_time": done,
        "preemptions": instance.preemptions,
    }


def run(options: Options) -> Outcome:
    """All arms at 120 % of the predicted capacity, over seeds."""
    seeds = options.seed_list(2)
    duration = 30.0 if options.quick else 150.0
    rate = 1.2 * predicted_rate(replace(fleets.mixed(1).instances[0], scheduler=BASE), PROMPT, OUTPUT)
    rows: dict[str, dict[str, Any]] = {}
    for arm, changes in ARMS.items():
        per_seed = [serve(replace(BASE, **changes), rate, duration, seed) for seed in seeds]
        rows[arm] = {
            key: {t: sum(r[key][t] for r in per_seed) / len(per_seed) for t in TIERS}
            for key in ("attainment", "ttft_p99_s", "longest_wait_s")
        }
        for key in ("tokens_per_s", "preemptions"):
            rows[arm][key] = sum(r[key] for r in per_seed) / len(per_seed)
    fcfs = rows["fcfs"]["tokens_per_s"]
    findings = []
    for arm, row in rows.items():
        row["throughput_share"] = row["tokens_per_s"] / fcfs
        findings.append(
            f"{arm}: interactive {row['attainment']['interactive']:.1%}, "
            f"standard {row['attainment']['standard']:.1%}, longest batch wait {row['longest_wait_s']['batch']:.0f} s, "
            f"throughput {row['throughput_share']:.1%} of fcfs"
        )
    order = (
        max(rows[a]["attainment"]["interactive"] for a in ("spf", "sjf", "fair"))
        - rows["fcfs"]["attainment"]["interactive"]
    )
    fill = rows["fcfs"]["tokens_per_s"] / rows["unmixed fcfs"]["tokens_per_s"] - 1.0
    findings.append(
        f"both axes: the best blind order gives interactive {100 * order:+.1f} points; "
        f"filling steps (mixed against prefill-first) gives {fill:+.1%} throughput"
    )
    return Outcome(
        experiment="tiers",
        quick=options.quick,
        seeds=seeds,
        data={"rate": rate, "arms": rows},
        findings=findings,
        panels=[
            Panel(
                title="interactive: TTFT <= 0.5 s at 120 % load",
                x="attainment",
                bars={a: r["attainment"]["interactive"] for a, r in rows.items()},
            ),
            Panel(
                title="longest wait of a batch request",
                x="s",
                bars={a: r["longest_wait_s"]["batch"] for a, r in rows.items()},
            ),
            Panel(title="throughput against fcfs", x="share", bars={a: r["throughput_share"] for a, r in rows.items()}),
        ],
    )


EXPERIMENT = Experiment("tiers", __doc__ or "", run)
