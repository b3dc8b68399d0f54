"""Writes the demo's recorded log and a few reports: simulated traffic over a small mixed fleet, always the same.

Run as a child process of `dashboard --demo` with the path to write; the reports go beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

from weighbridge.core.instance import StepTerms
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import Disturbance
from weighbridge.sim.fleet import SimulatedFleet, SimulatedInstance
from weighbridge.sim.report import as_dict, to_json
from weighbridge.sim.runs import Generated, Run, make_simulation
from weighbridge.sim.runs import run as simulate
from weighbridge.workload.arrivals import parse_arrivals
from weighbridge.workload.lengths import parse_lengths
from weighbridge.workload.synthetic import RequestClass, Synthetic

REQUESTS = 3_000
RATE = 11.0
REPORT_RATES = (4.0, 8.0, 12.0, 16.0)
REPORT_REQUESTS = 1_200
_FAST = StepTerms(base_s=0.0105, prefill_s=4.5e-5, sequence_s=6e-5, kv_s=6e-8)
_SLOW = StepTerms(base_s=0.0310, prefill_s=3.1e-4, sequence_s=3e-4, kv_s=2e-7)


def fleet() -> SimulatedFleet:
    """Three fast instances and four slow ones."""

    def one(name: str, terms: StepTerms, blocks: int, batch: int) -> SimulatedInstance:
        config = SchedulerConfig(blocks=blocks, max_sequences=batch)
        return SimulatedInstance(name, terms, config, disturbance=Disturbance(noise=0.08), pool="llama-8b")

    fast = [one(f"h100-{k}", _FAST, 12_000, 64) for k in range(3)]
    return SimulatedFleet((*fast, *(one(f"l4-{k}", _SLOW, 3_750, 16) for k in range(4))))


def run(policy: str = "calibrated", rate: float = RATE, requests: int = REQUESTS) -> Run:
    """One simulation; the defaults are the one that is recorded."""
    classes = (
        RequestClass("chat", 0.6, parse_lengths("exp:700", "input"), parse_lengths("exp:140", "output"), "interactive"),
        RequestClass(
            "document", 0.3, parse_lengths("exp:2600", "input"), parse_lengths("exp:160", "output"), "standard"
        ),
        RequestClass("batch", 0.1, parse_lengths("exp:1500", "input"), parse_lengths("exp:300", "output"), "batch"),
    )
    tenants = (("search", 3.0), ("support", 2.0), ("research", 1.0))
    traffic = Synthetic(parse_arrivals("gamma:2", rate), classes, tenants=tenants)
    router = {"record_decisions": True}
    return Run(fleet=fleet(), workload=Generated(traffic, count=requests), policy=policy, seed=11, router=router)


def write(stream: IO[bytes]) -> None:
    """Simulate and record."""
    one = run()
    make_simulation(one, log=stream).run(one.workload.requests(one.seed))


def main() -> int:
    """Write to a temporary name and rename, so that a reader never sees half a log."""
    path = Path(sys.argv[1])
    part = path.with_suffix(".part")
    with part.open("wb") as stream:
        write(stream)
    part.replace(path)
    for policy in ("calibrated", "least_tokens", "round_robin"):
        for rate in REPORT_RATES:
            report = to_json(as_dict(simulate(run(policy, rate, REPORT_REQUESTS))))
            path.with_name(f"{policy}-{rate:g}.json").write_text(report, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
