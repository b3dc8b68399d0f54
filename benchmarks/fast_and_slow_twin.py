"""The simulated twin of `fast_and_slow.py`: the same burst on step costs, and the least time that any split could take.

    python benchmarks/fast_and_slow_twin.py

One instance and another 6 times slower in decode and 35 times in prefill, 4 requests at a time on each, one request
every 50 ms, 128 tokens out, tier batch. *Cached*: 20 prompt tokens are left to compute (`--left`). *Cold*: 516. `best
split` tries, for every number k up to 8, the first k requests that find the fast one full on the slow one, four at a
time, and all others on the fast one in order. Five engines: one whose sequences are light, an embedded one by its
probed profile, the same with decode steps a quarter longer than its profile says, as a full context makes them, the
same by a full calibration, where a third sequence costs as much as a third and a fourth, and by the probe that measures
each number of sequences, with steps longer by as much as 516 tokens of context make them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from weighbridge.core.instance import StepTerms
from weighbridge.core.metrics import RequestRecord
from weighbridge.core.request import DEFAULT_TIERS
from weighbridge.routing.policy import Choice, View
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.fleet import SimulatedFleet, SimulatedInstance
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.runs import Run, make_simulation
from weighbridge.workload.trace import TraceRequest

SLOTS, OUTPUT, GAP_S = 4, 128, 0.05
PREFILL, DECODE = 35.0, 6.0
COLD = 516


@dataclass(frozen=True)
class Engine:
    """Seconds of the fast engine's steps, and by how much its decode steps are longer than its profile says."""

    name: str
    base_s: float
    sequence_s: float
    prefill_s: float
    longer: float = 1.0
    kv_s: float = 0.0
    knots: tuple[tuple[float, float], ...] = ()
    """Seconds by number of sequences, where they are no line."""

    def terms(self, slow: bool, true: bool) -> StepTerms:
        decode = (DECODE if slow else 1.0) * (self.longer if true else 1.0)
        return StepTerms(
            base_s=self.base_s * decode,
            sequence_s=self.sequence_s * decode,
            sequence_knots=tuple((count, seconds * decode) for count, seconds in self.knots),
            kv_s=self.kv_s * decode,
            prefill_s=self.prefill_s * (PREFILL if slow else 1.0),
        )


ENGINES = (
    Engine("light sequences", 0.006, 0.003, 0.0025),
    Engine("as probed", 0.003352, 0.010560, 0.005547),
    Engine("probed short, run long", 0.003352, 0.010560, 0.005547, longer=1.25),
    Engine("stairs", 0.0105, 0.0065, 0.00556, kv_s=8.6e-6, knots=((1, 0.0016), (2, 0.0138), (3, 0.026), (4, 0.0265))),
    Engine(
        "stairs, run long",
        0.0,
        0.01134,
        0.0057,
        longer=1.28,
        knots=((1, 0.0137), (2, 0.0271), (3, 0.0409), (4, 0.0454)),
    ),
)


@dataclass(frozen=True)
class Burst:
    count: int
    prompt: int

    def requests(self, seed: int) -> list[TraceRequest]:
        return [TraceRequest(GAP_S * n, self.prompt, OUTPUT, tier="batch") for n in range(self.count)]


class Split:
    """The first `most` requests that find the fast one full go to the slow one while it has room."""

    holds = True

    def __init__(self, most: int) -> None:
        self.left = most

    def choose(self, view: View) -> Choice:
        names = [option.instance.name for option in view.options]
        if "fast" in names:
            return Choice(names.index("fast"))
        if self.left and len(view.options[0].instance.charges) < SLOTS:
            self.left -= 1
            return Choice(0)
        return Choice(None if view.may_hold else 0)


@dataclass(frozen=True)
class Outcome:
    completion_s: float
    ttft_p95_s: float
    slow: int
    last_slow_s: float


def simulate(engine: Engine, burst: Burst, names: tuple[str, ...], policy: Split | None = None) -> Outcome:
    config = SchedulerConfig(
        token_budget=512, max_sequences=SLOTS, blocks=8_000, mixing="split", busy_prefill_tokens=64, prefill_rows=64
    )
    fleet = SimulatedFleet(
        tuple(
            SimulatedInstance(n, engine.terms(n == "slow", True), config, believed=engine.terms(n == "slow", False))
            for n in names
        )
    )
    settings = SimulationSettings(max_tokens=None)
    one = Run(fleet, burst, policy="calibrated", settings=settings, tiers=DEFAULT_TIERS)
    simulation = make_simulation(one)
    if policy is not None:
        simulation.router.policy = policy
    return outcome(simulation.run(burst.requests(1)))


def outcome(records: list[RequestRecord]) -> Outcome:
    assert all(r.status == "ok" for r in records)
    ttft = sorted((r.first_token_s or 0.0) - r.scheduled_s for r in records)
    last = max(len(ttft) * 95 // 100 - 1, 0) if len(ttft) > 20 else len(ttft) - 1
    slow = [r.last_token_s or 0.0 for r in records if r.instance == "slow"]
    return Outcome(max(r.last_token_s or 0.0 for r in records), ttft[last], len(slow), max(slow, default=0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left", type=int, default=20, metavar="TOKENS", help="of a cached prompt, to compute")
    left: int = parser.parse_args().left
    print("| engine | requests | prefix | fast alone s | best split | calibrated | p95 TTFT s, alone / calibrated |")
    print("|---|---|---|---|---|---|---|")
    for engine in ENGINES:
        for count, prompt in ((8, left), (48, left), (8, COLD), (48, COLD)):
            burst = Burst(count, prompt)
            alone = simulate(engine, burst, ("fast",))
            splits = [simulate(engine, burst, ("fast", "slow"), Split(k)) for k in range(9)]
            best = min(splits, key=lambda each: each.completion_s)
            both = simulate(engine, burst, ("fast", "slow"))
            cells = [
                f"{each.completion_s:.1f} ({100 * each.completion_s / alone.completion_s - 100:+.1f} %; "
                f"{f'{each.slow} slow, the last ends at {each.last_slow_s:.1f}' if each.slow else 'none slow'})"
                for each in (best, both)
            ]
            print(
                f"| {engine.name} | {count} | {'cold' if prompt == COLD else 'cached'} | {alone.completion_s:.1f} | "
                f"{' | '.join(cells)} | {alone.ttft_p95_s:.1f} / {both.ttft_p95_s:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
