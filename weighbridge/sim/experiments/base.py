"""What every experiment is made of: options in, an outcome out, a picture on request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from weighbridge.sim.runs import Result, Run
from weighbridge.sim.sweep import Progress, Spread, run_all, spread

Curve = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Options:
    """How big: `quick` is the size of a test. `seeds` overrides the number of seeds."""

    quick: bool = False
    seeds: int | None = None
    first_seed: int = 101
    jobs: int | None = None
    ray: bool = False
    progress: Progress | None = None

    def seed_list(self, full: int = 5, quick: int = 1) -> list[int]:
        """The seeds of a run; never those that anything was tuned on."""
        count = self.seeds or (quick if self.quick else full)
        return list(range(self.first_seed, self.first_seed + count))

    def run(self, runs: Sequence[Run]) -> list[Result]:
        """All results, in order. Raises KeyboardInterrupt when some were left out."""
        results = run_all(runs, jobs=self.jobs, ray=self.ray, progress=self.progress)
        if len(results) < len(runs):
            raise KeyboardInterrupt
        return results


class Panel(msgspec.Struct, frozen=True, kw_only=True):
    """One diagram: curves (or, with `bars`, values by name) with their axes."""

    title: str
    x: str = ""
    y: str = ""
    curves: dict[str, tuple[list[float], list[float]]] = {}
    bars: dict[str, float] = {}
    errors: dict[str, float] = {}
    log_x: bool = False
    log_y: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What an experiment found. `attainment` is the mean by policy over everything that it compares policies on."""

    experiment: str
    quick: bool
    seeds: list[int]
    attainment: dict[str, float] = {}
    by_trace: dict[str, dict[str, Spread]] = {}
    differences: dict[str, dict[str, Spread]] = {}
    data: dict[str, Any] = {}
    findings: list[str] = []
    loses: list[str] = []
    panels: list[Panel] = []


def outcome_dict(outcome: Outcome) -> dict[str, Any]:
    """For JSON: `by_trace` holds plain means, `spreads` the same with standard errors and extremes; no panels."""
    fields: dict[str, Any] = msgspec.to_builtins(outcome)
    del fields["panels"]
    fields["spreads"] = fields["by_trace"]
    fields["by_trace"] = {t: {p: v["mean"] for p, v in row.items()} for t, row in fields["spreads"].items()}
    return fields


@dataclass(frozen=True, slots=True)
class Experiment:
    """A named question and the function that answers it."""

    name: str
    question: str
    run: Callable[[Options], Outcome]


def attainments(results: Sequence[Result]) -> Spread:
    """Attainment over seeds."""
    return spread(r.summary.attainment for r in results)


def table(results: Mapping[tuple[str, str], Sequence[Result]]) -> dict[str, dict[str, Spread]]:
    """Attainment by trace (or place on a sweep) and policy, from results by (trace, policy)."""
    out: dict[str, dict[str, Spread]] = {}
    for (trace, policy), rows in results.items():
        out.setdefault(trace, {})[policy] = attainments(rows)
    return out


def paired(results: Mapping[tuple[str, str], Sequence[Result]], policy: str) -> dict[str, dict[str, Spread]]:
    """`policy` minus every other policy, by trace, paired by seed."""
    out: dict[str, dict[str, Spread]] = {}
    for (trace, other), rows in results.items():
        own = results.get((trace, policy))
        if other == policy or own is None:
            continue
        differences = [a.summary.attainment - b.summary.attainment for a, b in zip(own, rows, strict=True)]
        out.setdefault(trace, {})[other] = spread(differences)
    return out


def overall(by_trace: Mapping[str, Mapping[str, Spread]]) -> dict[str, float]:
    """Mean attainment by policy over the traces."""
    sums: dict[str, list[float]] = {}
    for row in by_trace.values():
        for policy, value in row.items():
            sums.setdefault(policy, []).append(value.mean)
    return {policy: sum(values) / len(values) for policy, values in sums.items()}


def compare_policies(
    make: Mapping[str, Callable[[str, int], Run]], policies: Sequence[str], seeds: Sequence[int], options: Options
) -> dict[tuple[str, str], list[Result]]:
    """Every policy on every trace over the seeds; `make[trace](policy, seed)` builds a run."""
    keys = [(trace, policy) for trace in make for policy in policies]
    runs = [make[trace](policy, seed) for trace, policy in keys for seed in seeds]
    results = options.run(runs)
    count = len(seeds)
    return {key: results[k * count : (k + 1) * count] for k, key in enumerate(keys)}


def variant(one: Run, policy: str) -> Run:
    """The run with a policy given as `name` or `name/dispatch` (`calibrated/immediate`)."""
    name, _, dispatch = policy.partition("/")
    router = {**one.router, "dispatch": dispatch} if dispatch else one.router
    return replace(one, policy=name, router=router)


def points(value: Spread) -> str:
    """A difference of attainments for people: `+4.2 ± 0.8 points (worst seed +1.7)`."""
    error = "" if value.standard_error is None else f" ± {100 * value.standard_error:.1f}"
    return f"{100 * value.mean:+.1f}{error} points (worst seed {100 * value.min:+.1f})"


def best_of(row: Mapping[str, Spread], names: Sequence[str]) -> str:
    """The name with the highest mean."""
    return max((name for name in names if name in row), key=lambda name: row[name].mean)
