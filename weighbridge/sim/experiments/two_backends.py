"""A slow and a fast backend of one node; is a whole request worth sending to the slow one, and when?

Step costs come from the given isolated rates (prefill 73 and 2,551, decode 45 and 293 tokens/s) and from the rate that
real batches on the fast one reached (89 to 101 tokens/s together at 4 sequences), so decoding there hardly batches. The
router's score uses the isolated rates, as in the document: it ranks work, it does not forecast time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weighbridge.core.instance import Rates, StepTerms
from weighbridge.core.metrics import RequestRecord, percentile
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.experiments.base import Experiment, Options, Outcome, Panel
from weighbridge.sim.fleet import SimulatedFleet, SimulatedInstance
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.runs import Run, run_with_records
from weighbridge.workload.prefixes import extend, mix64
from weighbridge.workload.streams import Streams
from weighbridge.workload.trace import TraceRequest

CPU, GPU = (
    Rates(prefill_tokens_per_s=73, decode_tokens_per_s=45),
    Rates(prefill_tokens_per_s=2551, decode_tokens_per_s=293),
)
BATCHED_GPU = 95.0  # tokens/s of 4 sequences together
PROMPT, OUTPUT, BLOCK = 516, 128, 16
SHARED = extend((), 496 // BLOCK, 7)  # 31 full blocks of the 512-token prefix are reusable


def backend(name: str, rates: Rates, batched: float, active: int) -> SimulatedInstance:
    """Costs from isolated rates: one sequence decodes at its rate, four together at `batched` tokens/s."""
    alone = 1.0 / rates.decode_tokens_per_s
    four = 4.0 / batched
    terms = StepTerms(
        base_s=1e-6, prefill_s=1.0 / rates.prefill_tokens_per_s, sequence_knots=((1.0, alone), (4.0, four))
    )
    config = SchedulerConfig(token_budget=512, max_sequences=active, blocks=4_000, prefix_caching=True)
    return SimulatedInstance(name, terms, config, rates=rates)


def fleet(mixed: bool, active: int = 4) -> SimulatedFleet:
    """Both backends, or the fast one alone. The slow one's four sequences share its isolated decode rate."""
    gpu = backend("gpu", GPU, BATCHED_GPU, active)
    return SimulatedFleet((gpu, backend("cpu", CPU, 45.0, active)) if mixed else (gpu,))


@dataclass(frozen=True, slots=True)
class Burst:
    """`count` equal requests, `gap_s` apart (or Poisson at that mean); a share `hits` of them has the shared prefix."""

    count: int
    gap_s: float = 0.05
    hits: float = 1.0
    poisson: bool = False

    def requests(self, seed: int) -> list[TraceRequest]:
        arrivals, choices = Streams(seed).get("arrivals"), Streams(seed).get("prefix")
        out, now = [], 0.0
        for k in range(self.count):
            hit = choices.random() < self.hits
            blocks = SHARED if hit else extend((), 31, mix64(seed * 1_000_003 + k + 1))
            out.append(TraceRequest(now, PROMPT, OUTPUT, blocks=blocks, block_tokens=BLOCK))
            now += arrivals.expovariate(1.0 / self.gap_s) if self.poisson else self.gap_s
        return out


def measure(work: Burst, *, mixed: bool, active: int = 4, warm: bool = True, seed: int = 1) -> dict[str, Any]:
    """One run: completion time of the whole, latencies, and who went to the slow backend (indices from 1)."""
    one = Run(
        fleet=fleet(mixed, active),
        workload=work,
        policy="work",
        seed=seed,
        settings=SimulationSettings(max_tokens=None),
        router={"dispatch": "immediate"},
    )
    _, records = run_with_records(one, warm=SHARED if warm else ())
    return summary(records)


def summary(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Completion time, latencies, throughput and shares."""
    ttft = sorted(r.ttft_s or 0.0 for r in records)
    e2e = sorted(r.e2e_s or 0.0 for r in records)
    end = max(r.last_token_s or 0.0 for r in records)
    return {
        "completion_s": end,
        "mean_e2e_s": sum(e2e) / len(e2e),
        "output_tokens_per_s": len(records) * OUTPUT / end,
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p95_s": percentile(ttft, 95),
        "e2e_p50_s": percentile(e2e, 50),
        "e2e_p95_s": percentile(e2e, 95),
        "cpu_requests": sum(r.instance == "cpu" for r in records),
        "cpu_indices": [k for k, r in enumerate(records, 1) if r.instance == "cpu"],
    }


def change(both: dict[str, Any], gpu: dict[str, Any], key: str) -> float:
    """Relative change from all-fast to mixed routing."""
    return float(both[key] / gpu[key] - 1.0)


Pair = tuple[dict[str, Any], ...]
"""Figures of one case with the fast backend alone, and with both."""


def _findings(cases: Mapping[int, Pair], cold: Mapping[int, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """What both backends together gain, and what they lose."""
    findings: list[str] = []
    loses: list[str] = []
    for n, (gpu, both) in cases.items():
        first = both["cpu_indices"][0] if both["cpu_indices"] else None
        findings.append(
            f"{n} requests: completion {gpu['completion_s']:.2f} -> {both['completion_s']:.2f} s "
            f"({change(both, gpu, 'completion_s'):+.1%}), {both['cpu_requests']} to the slow backend, the first is "
            f"request {first}"
        )
        for key in ("ttft_p50_s", "ttft_p95_s", "e2e_p50_s", "e2e_p95_s", "mean_e2e_s"):
            moved = change(both, gpu, key)
            (findings if moved <= 0 else loses).append(f"{n} requests: {key} {moved:+.1%}")
    offloaded = ", ".join(f"{row['cpu_requests']} of {n}" for n, row in cold.items())
    findings.append(f"cold prefixes (handicap 34.9 times in prefill): {offloaded} go to the slow backend")
    return findings, loses


def _panels(
    by_active: Mapping[int, Pair], by_hits: Mapping[float, dict[str, Any]], sustained: Mapping[float, Pair]
) -> list[Panel]:
    return [
        Panel(
            title="48 requests: completion by active sequences",
            x="active at most per backend",
            y="s",
            log_x=True,
            curves={
                "all GPU": ([float(a) for a in by_active], [by_active[a][0]["completion_s"] for a in by_active]),
                "mixed": ([float(a) for a in by_active], [by_active[a][1]["completion_s"] for a in by_active]),
            },
        ),
        Panel(
            title="48 requests: share of the slow backend by warm share",
            x="share of requests with the shared prefix",
            y="requests of 48",
            curves={"mixed": (list(by_hits), [float(row["cpu_requests"]) for row in by_hits.values()])},
        ),
        Panel(
            title="sustained Poisson arrivals, 300 requests",
            x="requests/s",
            y="mean completion [s]",
            log_y=True,
            curves={
                "all GPU": ([1 / g for g in sustained], [sustained[g][0]["mean_e2e_s"] for g in sustained]),
                "mixed": ([1 / g for g in sustained], [sustained[g][1]["mean_e2e_s"] for g in sustained]),
            },
        ),
    ]


def run(options: Options) -> Outcome:
    """The two recorded cases, the crossover, the control and three sweeps."""
    counts = [8, 48]
    cases = {n: (measure(Burst(n), mixed=False), measure(Burst(n), mixed=True)) for n in counts}
    cold = {n: measure(Burst(n, hits=0.0), mixed=True, warm=False) for n in (8, 12, 48)}
    alone = {
        name: measure(Burst(1), mixed=False)
        if name == "warm gpu"
        else measure(Burst(1, hits=0.0), mixed=False, warm=False)
        for name in ("warm gpu", "cold gpu")
    }
    active = [1, 4] if options.quick else [1, 2, 4, 8, 16]
    by_active = {
        a: (measure(Burst(48), mixed=False, active=a), measure(Burst(48), mixed=True, active=a)) for a in active
    }
    hits = [0.0, 1.0] if options.quick else [0.0, 0.25, 0.5, 0.75, 0.9, 1.0]
    by_hits = {h: measure(Burst(48, hits=h), mixed=True, seed=options.first_seed) for h in hits}
    gaps = [1.3] if options.quick else [2.0, 1.6, 1.4, 1.3, 1.2, 1.0]
    sustained = {
        g: tuple(measure(Burst(300, g, poisson=True), mixed=m, seed=options.first_seed) for m in (False, True))
        for g in gaps
    }
    findings, loses = _findings(cases, cold)
    return Outcome(
        experiment="two-backends",
        quick=options.quick,
        seeds=[1, options.first_seed],
        data={
            "cases": {str(n): {"all_gpu": gpu, "mixed": both} for n, (gpu, both) in cases.items()},
            "handicap": {
                "prefill": GPU.prefill_tokens_per_s / CPU.prefill_tokens_per_s,
                "decode": GPU.decode_tokens_per_s / CPU.decode_tokens_per_s,
            },
            "isolated": alone,
            "cold": {str(n): row for n, row in cold.items()},
            "by_active": {str(a): {"all_gpu": g, "mixed": m} for a, (g, m) in by_active.items()},
            "by_hit_rate": {str(h): row for h, row in by_hits.items()},
            "sustained": {str(g): {"all_gpu": a, "mixed": m} for g, (a, m) in sustained.items()},
        },
        findings=findings,
        loses=loses,
        panels=_panels(by_active, by_hits, sustained),
    )


EXPERIMENT = Experiment("two-backends", __doc__ or "", run)
