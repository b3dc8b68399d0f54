"""Paired differences between arms over repeats, with confidence intervals and the noise from run to run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

METRICS = (
    "attainment", "goodput_per_s", "shed_rate", "output_tokens_per_s",
    "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_p50_s", "e2e_p99_s",
)  # fmt: skip

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def figures(report: Mapping[str, Any]) -> dict[str, float]:
    """The compared figures of one report."""
    out = {name: float(report[name]) for name in ("attainment", "goodput_per_s", "shed_rate", "output_tokens_per_s")}
    for metric in ("ttft", "tpot", "e2e"):
        for q in ("p50", "p99"):
            out[f"{metric}_{q}_s"] = float(report[f"{metric}_s"][q])
    return out


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean, standard deviation and 95 % confidence interval of the mean (None for a single value)."""
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return {"mean": None, "sd": None, "low": None, "high": None, "count": 0}
    mean = math.fsum(known) / len(known)
    if len(known) < 2:
        return {"mean": mean, "sd": None, "low": None, "high": None, "count": 1}
    sd = math.sqrt(math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1))
    freedom = len(known) - 1
    half = (_T[freedom - 1] if freedom <= len(_T) else 1.96) * sd / math.sqrt(len(known))
    return {"mean": mean, "sd": sd, "low": mean - half, "high": mean + half, "count": len(known)}


def paired(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Arms side by side; the k-th runs of all arms saw the same schedule. Differences are to the first arm.

    `sd` of an arm over its repeats is the run-to-run noise together with that of the schedules; `sd` of the paired
    difference is free of the latter. `decided` says that the interval does not hold 0.
    """
    first = next(iter(runs))
    table: dict[str, Any] = {}
    for arm, rows in runs.items():
        entry: dict[str, Any] = {name: interval([row[name] for row in rows]) for name in METRICS}
        if arm != first:
            differences = {}
            for name in METRICS:
                found = interval([row[name] - base[name] for row, base in zip(rows, runs[first], strict=False)])
                low, high = found["low"], found["high"]
                differences[name] = {**found, "decided": low is not None and high is not None and (low > 0 or high < 0)}
            entry["difference"] = differences
        table[arm] = entry
    return table
