"""Many runs on all cores, or on a Ray cluster; and the paired comparison of policies over seeds."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.sim.runs import Result, Run, run

Progress = Callable[[int, int], None]


def run_all(
    runs: Sequence[Run], *, jobs: int | None = None, ray: bool = False, progress: Progress | None = None
) -> list[Result]:
    """Results in the order of `runs`. After Ctrl-C, those that were done (in order); the rest is left out.

    `jobs` processes (default: all cores; 1 runs here, in this process). With `ray`, tasks of the cluster at
    RAY_ADDRESS, or of a local one.
    """
    if not runs:
        return []
    if ray:
        return _run_on_ray(runs, progress)
    jobs = min(jobs or os.cpu_count() or 1, len(runs))
    if jobs <= 1:
        return _run_here(runs, progress)
    results: dict[int, Result] = {}
    # Children are spawned, not forked: they start clean whatever threads the caller has.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_ignore_interrupt)
    try:
        pending: dict[Future[Result], int] = {pool.submit(run, one): k for k, one in enumerate(runs)}
        while pending:
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                results[pending.pop(future)] = future.result()
                if progress is not None:
                    progress(len(results), len(runs))
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
    else:
        pool.shutdown()
    return [results[k] for k in sorted(results)]


def _ignore_interrupt() -> None:
    """Ctrl-C goes to the parent, which keeps what is done; children finish the run they are at."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_here(runs: Sequence[Run], progress: Progress | None) -> list[Result]:
    results: list[Result] = []
    try:
        for one in runs:
            results.append(run(one))
            if progress is not None:
                progress(len(results), len(runs))
    except KeyboardInterrupt:
        pass
    return results


def _run_on_ray(runs: Sequence[Run], progress: Progress | None) -> list[Result]:
    try:
        import ray
    except ImportError:
        raise ConfigError("--ray needs Ray: pip install 'weighbridge[ray]'") from None
    ray.init(address=os.environ.get("RAY_ADDRESS"), ignore_reinit_error=True, log_to_driver=False)
    remote = ray.remote(run)
    pending = {remote.remote(one): k for k, one in enumerate(runs)}
    results: dict[int, Result] = {}
    try:
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1)
            for reference in done:
                results[pending.pop(reference)] = ray.get(reference)
                if progress is not None:
                    progress(len(results), len(runs))
    except KeyboardInterrupt:
        for reference in pending:
            ray.cancel(reference)
    return [results[k] for k in sorted(results)]


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over seeds with its standard error (None for one seed) and extremes."""

    mean: float
    standard_error: float | None
    min: float
    max: float
    count: int


def spread(values: Iterable[float]) -> Spread:
    """The spread of values; at least one."""
    known = list(values)
    mean = math.fsum(known) / len(known)
    error = None
    if len(known) > 1:
        variance = math.fsum((v - mean) ** 2 for v in known) / (len(known) - 1)
        error = math.sqrt(variance / len(known))
    return Spread(mean=mean, standard_error=error, min=min(known), max=max(known), count=len(known))


def compare(results: Sequence[Result]) -> dict[str, Any]:
    """Policies side by side over seeds: spreads per policy, and differences to the first policy paired by seed."""
    by_policy: dict[str, list[Result]] = {}
    for result in results:
        by_policy.setdefault(result.policy, []).append(result)
    first = next(iter(by_policy.values()), [])
    reference = {r.seed: r.summary.attainment for r in first}
    table = {}
    for name, rows in by_policy.items():
        row: dict[str, Any] = {
            "attainment": spread(r.summary.attainment for r in rows),
            "goodput_per_s": spread(r.summary.goodput_per_s for r in rows),
            "shed_rate": spread(r.summary.shed_rate for r in rows),
            "ttft_p50_s": spread(r.summary.ttft_s.p50 for r in rows),
            "ttft_p99_s": spread(r.summary.ttft_s.p99 for r in rows),
            "tpot_p99_s": spread(r.summary.tpot_s.p99 for r in rows),
            "e2e_mean_s": spread(r.summary.e2e_s.mean for r in rows),
            "preemptions": spread(float(r.preemptions) for r in rows),
        }
        paired = [r.summary.attainment - reference[r.seed] for r in rows if r.seed in reference]
        if name != first[0].policy and paired:
            row["difference"] = spread(paired)
        table[name] = row
    return table
