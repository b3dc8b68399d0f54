"""Every policy in every regime, in simulation, paired on equal traces: where the calibrated one wins and by how much.

    python benchmarks/policies.py run --regimes all --seeds 901 902 903 904 905 --out results.jsonl
    python benchmarks/policies.py table results.jsonl
    python benchmarks/policies.py against round_robin least_requests --files results.jsonl --regimes 8/mixed

`run` appends one JSON line per simulation and skips those that are there already, so it can be stopped and resumed.
Recorded regimes need `--traces DIR` with the public traces. `table` prints Markdown: per regime the best baseline
(the best mean over the seeds), the paired difference of `calibrated` with its standard error and worst seed, P99 TTFT
and TPOT over all served requests as means over the seeds, the ratio of those TTFTs, in how many seeds the ratio of
that seed is above 2, and the shed rate with its worst seed. `against` takes the best of the named baselines only.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.prefix_regimes import PREFIX_REGIMES, mooncake_run
from weighbridge.sim import fleet as fleets
from weighbridge.sim.cost_runner import Disturbance
from weighbridge.sim.fleet import Fault
from weighbridge.sim.lab import REGIMES, azure_run
from weighbridge.sim.runs import Generated, Run, run

BASELINES = (
    "round_robin",
    "random",
    "least_requests",
    "power_of_two",
    "prompt_length",
    "length_threshold",
    "least_tokens",
    "kv_free",
    "speed_requests",
    "work",
    "drain_time",
    "block_cost",
    "prefix_affinity",
    "affinity_gate",
    "paper_score",
)
STRONG = (
    "round_robin",
    "least_requests",
    "least_tokens",
    "drain_time",
    "speed_requests",
    "block_cost",
    "affinity_gate",
)
TAIL = 2.0
"""How many times the best baseline's P99 TTFT may be: the bound that `table` counts seeds against."""
AZURE = {"8/azure-conversation": ("azure_conv.2023.csv.gz", 67.0), "8/azure-code": ("azure_code.2023.csv.gz", 10.6)}


def at_load(name: str, load: float) -> Callable[..., Run]:
    return lambda policy, seed, **more: REGIMES[name].run(policy, seed, load=load, **more)


def disturbed(name: str, load: float, **disturbance: float) -> Callable[..., Run]:
    changed = REGIMES[name].fleet.changed(disturbance=Disturbance(**disturbance))
    return lambda policy, seed, **more: REGIMES[name].run(policy, seed, load=load, fleet=changed, **more)


def with_fault(name: str, *faults: Fault) -> Callable[..., Run]:
    broken = replace(REGIMES[name].fleet, faults=faults)
    return lambda policy, seed, **more: REGIMES[name].run(policy, seed, load=0.8, fleet=broken, **more)


def varied(name: str, load: float, **changes: Any) -> Callable[..., Run]:
    """The regime's requests with prefixes or tenants."""

    def make(policy: str, seed: int, **more: Any) -> Run:
        one = REGIMES[name].run(policy, seed, load=load, **more)
        assert isinstance(one.workload, Generated)
        synthetic = replace(one.workload.synthetic, **changes)
        return replace(one, workload=replace(one.workload, synthetic=synthetic))

    return make


def sized(count: int) -> Callable[..., Run]:
    return lambda policy, seed, **more: REGIMES["8/mixed"].run(policy, seed, fleet=fleets.mixed(count), **more)


EXTRA: dict[str, Callable[..., Run]] = {
    "8/mixed at 1.25": at_load("8/mixed", 1.25),
    "2P+4D/mixed at 1.25": at_load("2P+4D/mixed", 1.25),
    "4+4/mixed at 1.25": at_load("4+4/mixed", 1.25),
    "8/mixed at 0.3": at_load("8/mixed", 0.3),
    "8/chat at 0.3": at_load("8/chat", 0.3),
    "8/mixed at 1.5": at_load("8/mixed", 1.5),
    "8/chat at 1.5": at_load("8/chat", 1.5),
    "8/mixed, 10 % step noise": disturbed("8/mixed", 0.95, noise=0.1),
    "8/mixed, steps bent 30 %": disturbed("8/mixed", 0.9, noise=0.15, bend=0.3),
    "8/mixed, one slows 3x unannounced": with_fault("8/mixed", Fault(60.0, "slow", "i3", 3.0)),
    "8/mixed, one dies": with_fault("8/mixed", Fault(60.0, "fail", "i3"), Fault(100.0, "start", "i3")),
    "8/mixed, two tenants, one floods": varied("8/mixed", 1.1, tenants=(("flood", 9.0), ("small", 1.0))),
}
SIZES = {f"{n} instances, rate of 8/mixed": sized(n) for n in range(5, 11)}
RECORDED_SIZES = {
    f"{n} instances, {trace}": (trace, n) for trace in ("azure-conversation", "mooncake") for n in range(5, 11)
}


def build(name: str, policy: str, seed: int, traces: Path | None, seconds: float | None) -> Run:
    recorded, count = RECORDED_SIZES.get(name, (name.removeprefix("8/"), 8))
    if recorded == "mooncake" or f"8/{recorded}" in AZURE:
        if traces is None:
            raise SystemExit(f"{name} needs --traces")
        if recorded == "mooncake":
            return replace(mooncake_run(traces, policy, seed, count=count), label=name)
        file, rate = AZURE[f"8/{recorded}"]
        one = azure_run(str(traces / file), rate, policy, seed, label=name)
        return replace(one, fleet=fleets.mixed(count))
    if name in PREFIX_REGIMES:
        return replace(PREFIX_REGIMES[name](policy, seed), label=name)
    make = EXTRA.get(name) or SIZES.get(name) or at_load(name, 1.0)
    one = make(policy, seed)
    if seconds is not None and isinstance(one.workload, Generated) and one.workload.duration_s is not None:
        one = replace(one, workload=replace(one.workload, duration_s=min(seconds, one.workload.duration_s)))
    return replace(one, label=name)


def figures(name: str, policy: str, seed: int, one: Run, options: dict[str, Any]) -> dict[str, Any]:
    result = run(replace(one, options=options) if options else one)
    s = result.summary
    return {
        "regime": name,
        "policy": policy,
        "seed": seed,
        "options": options,
        "attainment": s.attainment,
        "ttft_p50_s": s.ttft_s.p50,
        "ttft_p99_s": s.ttft_s.p99,
        "tpot_p99_s": s.tpot_s.p99,
        "shed": s.shed_rate,
        "offered": s.offered,
        "preemptions": result.preemptions,
        "cpu_s": result.cpu_s,
    }


def sweep(arguments: argparse.Namespace) -> None:
    groups = {
        "all": [*REGIMES, *AZURE, "8/mooncake"],
        "extra": list(EXTRA),
        "prefix": list(PREFIX_REGIMES),
        "sizes": [*SIZES, *RECORDED_SIZES],
    }
    names = [n for given in arguments.regimes for n in groups.get(given, [given])]
    policies = {"all": [*BASELINES, "calibrated"], "strong": [*STRONG, "calibrated"]}.get(
        arguments.policies, arguments.policies.split(",")
    )
    options = json.loads(arguments.options)
    done: set[tuple[Any, ...]] = set()
    if arguments.out.exists():
        rows = map(json.loads, arguments.out.read_text().splitlines())
        done = {(r["regime"], r["policy"], r["seed"], json.dumps(r["options"])) for r in rows}
    with arguments.out.open("a") as out:
        for seed in arguments.seeds:
            for name in names:
                for policy in policies:
                    own = options if policy == "calibrated" else {}
                    if (name, policy, seed, json.dumps(own)) in done:
                        continue
                    one = build(name, policy, seed, arguments.traces, arguments.seconds)
                    out.write(json.dumps(figures(name, policy, seed, one, own)) + "\n")
                    out.flush()


Runs = dict[int, dict[str, Any]]
"""One policy in one regime, by seed."""


def read(files: list[Path]) -> dict[str, dict[str, Runs]]:
    """Rows of results by regime, policy and seed."""
    by: dict[str, dict[str, Runs]] = {}
    for path in files:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            by.setdefault(row["regime"], {}).setdefault(row["policy"], {})[row["seed"]] = row
    return by


def mean(runs: Runs, key: str, seeds: list[int]) -> float:
    return fmean(runs[seed][key] for seed in seeds)


def compare(name: str, ours: Runs, baselines: dict[str, Runs]) -> str:
    """One line of the table: `calibrated` against the best of these in the regime, over the seeds that all have."""
    seeds = sorted(set(ours).intersection(*baselines.values()))
    if not baselines or not seeds:
        raise SystemExit(f"{name}: there is no seed with which calibrated and all of its baselines were run")
    best = max(baselines, key=lambda policy: mean(baselines[policy], "attainment", seeds))
    theirs = baselines[best]
    paired = [100 * (ours[s]["attainment"] - theirs[s]["attainment"]) for s in seeds]
    error = stdev(paired) / math.sqrt(len(paired)) if len(paired) > 1 else math.nan
    tails = [(theirs[s]["ttft_p99_s"], ours[s]["ttft_p99_s"]) for s in seeds]
    longer = sum(mine > TAIL * base for base, mine in tails)
    ratio = sum(mine for _, mine in tails) / sum(base for base, _ in tails)
    shed = [100 * ours[s]["shed"] for s in seeds]
    return (
        f"| {name} | {best} | {100 * mean(theirs, 'attainment', seeds):.1f} | "
        f"{100 * mean(ours, 'attainment', seeds):.1f} | {fmean(paired):+.1f} ± {error:.1f} | {min(paired):+.1f} | "
        f"{mean(theirs, 'ttft_p99_s', seeds):.2f} / {mean(ours, 'ttft_p99_s', seeds):.2f} | {ratio:.1f} | "
        f"{longer} of {len(seeds)} | "
        f"{1e3 * mean(theirs, 'tpot_p99_s', seeds):.0f} / {1e3 * mean(ours, 'tpot_p99_s', seeds):.0f} | "
        f"{fmean(shed):.2f} ({max(shed):.2f}) |"
    )


def table(arguments: argparse.Namespace) -> None:
    """Per regime against the best of all baselines, or of those in `against`."""
    against = getattr(arguments, "against", None)
    print("| regime | best baseline | its % | calibrated % | difference ± SE | worst seed | P99 TTFT s | ratio | "
          f"above {TAIL:g}x | P99 TPOT ms | shed % (worst) |")  # fmt: skip
    print("|---" * 11 + "|")
    for name, policies in read(arguments.files).items():
        if arguments.regimes and name not in arguments.regimes:
            continue
        ours = policies.pop("calibrated", None)
        if ours:
            print(compare(name, ours, {p: runs for p, runs in policies.items() if not against or p in against}))


def matrix(arguments: argparse.Namespace) -> None:
    """Mean attainment of every policy in every regime, over the seeds that all of its policies have."""
    rows = [json.loads(line) for path in arguments.files for line in path.read_text().splitlines()]
    policies = list(dict.fromkeys(r["policy"] for r in rows))
    print("| regime | seeds | " + " | ".join(policies) + " |\n|---" + "|---" * (1 + len(policies)) + "|")
    for name in dict.fromkeys(r["regime"] for r in rows):
        by = {
            p: {r["seed"]: r["attainment"] for r in rows if (r["regime"], r["policy"]) == (name, p)} for p in policies
        }
        seeds = set.intersection(*(set(runs) for runs in by.values()))
        cells = [f"{100 * fmean(by[p][s] for s in seeds):.1f}" if seeds else "" for p in policies]
        print(f"| {name} | {len(seeds)} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run")
    running.add_argument("--regimes", nargs="+", default=["all"], help="all, extra, prefix, sizes, or names")
    running.add_argument("--policies", default="all", help="all, strong, or names separated by commas")
    running.add_argument("--seeds", nargs="+", type=int, default=[901, 902, 903, 904, 905])
    running.add_argument("--seconds", type=float, help="at most this much arrival time per run")
    running.add_argument("--traces", type=Path)
    running.add_argument("--options", default="{}", help="options of the calibrated policy, JSON")
    running.add_argument("--out", type=Path, required=True)
    running.set_defaults(do=sweep)
    tabling = commands.add_parser("table")
    tabling.add_argument("files", nargs="+", type=Path)
    tabling.add_argument("--regimes", nargs="+", help="only these")
    tabling.set_defaults(do=table)
    some = commands.add_parser("against", help="the table against the best of some baselines only")
    some.add_argument("against", nargs="+", metavar="NAME", choices=BASELINES)
    some.add_argument("--files", nargs="+", type=Path, required=True)
    some.add_argument("--regimes", nargs="+", help="only these")
    some.set_defaults(do=table)
    listing = commands.add_parser("matrix")
    listing.add_argument("files", nargs="+", type=Path)
    listing.set_defaults(do=matrix)
    arguments = parser.parse_args()
    arguments.do(arguments)


if __name__ == "__main__":
    main()
