"""Fit the step-time model to whole requests: replay, fit the seconds to the replayed work, replay again.

The schedule depends on the coefficients and the coefficients on the schedule; the iteration goes half of the way each
time and keeps the round that forecast the fitted requests best. Requests that were preempted in the replay are left
out of the fit: when it happens in reality is chance, and their seconds say little of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from weighbridge.calibrate.replay import RecordedRequest, Replayed, replay
from weighbridge.core.instance import StepTerms
from weighbridge.core.metrics import percentile
from weighbridge.cost.fit import Observation, StepFit, fit_steps
from weighbridge.cost.profile import Quantiles
from weighbridge.scheduling.scheduler import SchedulerConfig

METRICS = ("ttft_s", "tpot_s", "e2e_s")
START = StepTerms(base_s=0.012, prefill_s=6e-5, attend_s=0.0, sequence_s=3e-5, kv_s=5e-8)
TERMS = ("base_s", "prefill_s", "attend_s", "sequence_s", "kv_s")
_SETTLED = 0.003


class MetricError(msgspec.Struct, frozen=True, kw_only=True):
    """How a forecast compares with what happened, relative to what happened. `bias_*` are signed."""

    count: int
    mape: float
    median: float
    p90: float
    p99: float
    bias_mean: float
    bias_p50: float
    bias_p99: float


@dataclass(frozen=True, slots=True)
class RequestFit:
    """The fitted model, and how every request of the run was forecast by it."""

    fit: StepFit
    replayed: Sequence[Replayed]
    rounds: int


def fit_requests(
    requests: Sequence[RecordedRequest],
    config: SchedulerConfig,
    *,
    fitted: Sequence[bool],
    rng: np.random.Generator,
    start: StepTerms = START,
    terms: Sequence[str] = TERMS,
    extra: Sequence[Observation] = (),
    rounds: int = 12,
    piecewise: bool | None = False,
    least_spread: float = 0.0,
    progress: Callable[[float, float], None] = lambda done, total: None,
) -> RequestFit:
    """Fit on the requests for which `fitted` is true; all of them are replayed, since they share the engine.

    With `overhead_s` among the terms a fixed time per request outside any step is fitted too. `extra` are direct
    observations of steps that join every fit.

    Raises:
        ValueError: too few requests for the number of terms.
    """
    overhead = "overhead_s" in terms
    model, overhead_s = start, 0.0
    best: tuple[float, StepFit] | None = None
    latest: StepFit | None = None
    for done in range(rounds):
        progress(done, rounds)
        replayed = replay(requests, model, config, overhead_s=overhead_s)
        score = _score(_picked(replayed, fitted))
        if latest is not None and (best is None or score < best[0]):
            best = (score, _with_model(latest, model, overhead_s))
        observations = [*extra, *_clean(_picked(replayed, fitted), overhead)]
        latest = fit_steps(
            observations, terms=terms, rng=rng, hold_out=0.0, piecewise=piecewise, least_spread=least_spread
        )
        moved = _halfway(model, latest.terms)
        change = _change(model, moved)
        model, overhead_s = moved, 0.5 * (overhead_s + latest.overhead_s)
        if change < _SETTLED:
            break
    assert latest is not None
    replayed = replay(requests, model, config, overhead_s=overhead_s)
    last = _score(_picked(replayed, fitted))
    if best is not None and best[0] < last:
        chosen = best[1]
        replayed = replay(requests, chosen.terms, config, overhead_s=chosen.overhead_s)
    else:
        chosen = _with_model(latest, model, overhead_s)
    progress(rounds, rounds)
    return RequestFit(fit=chosen, replayed=replayed, rounds=done + 1)


def compare(replayed: Sequence[Replayed]) -> dict[str, MetricError]:
    """Error of TTFT, TPOT and E2E over the given requests."""
    return {metric: _error_of(pairs(replayed, metric)) for metric in METRICS}


def pairs(replayed: Sequence[Replayed], metric: str) -> list[tuple[float, float]]:
    """(observed, forecast) seconds of the requests that have the metric."""
    found = [(getattr(r.request, metric), getattr(r, metric)) for r in replayed]
    return [(observed, forecast) for observed, forecast in found if observed is not None and observed > 0]


def residual_quantiles(values: Sequence[float]) -> Quantiles:
    """Quantiles of relative residuals, observed / forecast - 1."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles()
    p05, p25, p50, p75, p95 = (percentile(ordered, q) for q in (5.0, 25.0, 50.0, 75.0, 95.0))
    sizes = sorted(abs(value) for value in ordered)
    return Quantiles(
        p05=p05,
        p25=p25,
        p50=p50,
        p75=p75,
        p95=p95,
        mape=math.fsum(sizes) / len(sizes),
        median=percentile(sizes, 50.0),
        count=len(sizes),
    )


def _error_of(found: Sequence[tuple[float, float]]) -> MetricError:
    observed = np.asarray([o for o, _ in found])
    forecast = np.asarray([f for _, f in found])
    if not len(found):
        nan = float("nan")
        return MetricError(count=0, mape=nan, median=nan, p90=nan, p99=nan, bias_mean=nan, bias_p50=nan, bias_p99=nan)
    error = np.abs(forecast / observed - 1.0)
    return MetricError(
        count=len(found),
        mape=float(error.mean()),
        median=float(np.median(error)),
        p90=float(np.percentile(error, 90)),
        p99=float(np.percentile(error, 99)),
        bias_mean=float(forecast.mean() / observed.mean() - 1.0),
        bias_p50=float(np.median(forecast) / np.median(observed) - 1.0),
        bias_p99=float(np.percentile(forecast, 99) / np.percentile(observed, 99) - 1.0),
    )


def _score(replayed: Sequence[Replayed]) -> float:
    """Mean error over the metrics; the median for TTFT, where the phase of a step on arrival is chance."""
    errors = compare(replayed)
    return errors["ttft_s"].median + errors["tpot_s"].mape + errors["e2e_s"].mape


def _picked(replayed: Sequence[Replayed], wanted: Sequence[bool]) -> list[Replayed]:
    return [r for r, yes in zip(replayed, wanted, strict=True) if yes]


def _clean(replayed: Sequence[Replayed], overhead: bool) -> list[Observation]:
    return [o for r in replayed if not r.preemptions for o in r.observations(overhead=overhead)]


def _with_model(fit: StepFit, model: StepTerms, overhead_s: float) -> StepFit:
    return StepFit(
        terms=model,
        overhead_s=overhead_s,
        errors=fit.errors,
        condition_number=fit.condition_number,
        unidentified=fit.unidentified,
        residuals=fit.residuals,
        observations=fit.observations,
        design=fit.design,
        solution=fit.solution,
    )


def _halfway(old: StepTerms, new: StepTerms) -> StepTerms:
    mean = {
        name: 0.5 * (getattr(old, name) + getattr(new, name))
        for name in ("base_s", "prefill_s", "attend_s", "sequence_s", "kv_s", "scan_s")
    }
    if not new.sequence_knots:
        return StepTerms(**mean)
    before = dict(old.sequence_knots)
    knots = tuple(
        (count, 0.5 * (before.get(count, old.sequence_s * count) + seconds)) for count, seconds in new.sequence_knots
    )
    return StepTerms(**mean, sequence_knots=knots)


def _change(old: StepTerms, new: StepTerms) -> float:
    """Largest relative change of a coefficient that carries weight: those near zero may wander."""
    changes: list[float] = []
    for name in ("base_s", "prefill_s", "sequence_s", "kv_s"):
        before, after = float(getattr(old, name)), float(getattr(new, name))
        changes.append(abs(after - before) / max(before, float(getattr(START, name))))
    return max(changes)
