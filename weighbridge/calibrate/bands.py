"""Error bands of forecast requests: replays with other coefficients that the data allow, times what no model explains.

Each draw takes coefficients from the fit's own uncertainty and replays the whole run, so that in a queue the errors
add up as they would; every request's draw is then multiplied by a residual of the same metric that was held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weighbridge.calibrate.fitting import METRICS
from weighbridge.calibrate.replay import RecordedRequest, replay
from weighbridge.core.instance import StepTerms
from weighbridge.cost.profile import Profile, Quantiles
from weighbridge.scheduling.scheduler import SchedulerConfig

Array = NDArray[np.float64]


def request_bands(
    requests: Sequence[RecordedRequest],
    profile: Profile,
    config: SchedulerConfig,
    *,
    rng: np.random.Generator,
    coverage: float = 0.9,
    draws: int = 40,
) -> dict[str, tuple[Array, Array]]:
    """Lower and upper seconds by metric, one value per request (NaN where a metric is undefined).

    Raises:
        ValueError: the profile has no step-time model.
    """
    if profile.step is None:
        raise ValueError("the profile has no step-time model")
    samples: dict[str, list[list[float]]] = {metric: [] for metric in METRICS}
    shared = common_error(profile.residuals)
    for _ in range(draws):
        terms = draw_terms(profile.step, profile.step_errors, rng, spread=shared)
        overhead = profile.overhead_s
        for metric, values in _metrics(replay(requests, terms, config, overhead_s=overhead)).items():
            samples[metric].append(values)
    tail = (1.0 - coverage) / 2.0
    found = {}
    for metric, rows in samples.items():
        factor = 1.0 + draw_residuals(profile.residuals.get(metric, Quantiles()), (draws, len(requests)), rng)
        drawn = np.asarray(rows, dtype=np.float64) * factor
        found[metric] = (np.quantile(drawn, tail, axis=0), np.quantile(drawn, 1.0 - tail, axis=0))
    return found


def common_error(residuals: Mapping[str, Quantiles]) -> float:
    """How far a whole run may be off at once: the median residual of E2E says which way, half its spread how far."""
    q = residuals.get("e2e_s", Quantiles())
    return max(abs(q.p50), 0.5 * (q.p75 - q.p25)) if q.count else 0.05


def draw_terms(
    terms: StepTerms, errors: StepTerms | None, rng: np.random.Generator, *, spread: float = 0.0
) -> StepTerms:
    """Coefficients at random within their standard errors, all scaled by one factor of relative width `spread`."""
    scale = float(np.exp(rng.normal(0.0, spread))) if spread > 0 else 1.0
    drawn = {}
    for name in ("base_s", "prefill_s", "attend_s", "sequence_s", "kv_s", "scan_s"):
        value = float(getattr(terms, name))
        error = float(getattr(errors, name)) if errors is not None else 0.0
        # a term that the data cannot tell from another moves against it, so its own error must not move the sum
        error = min(error, 0.1 * value)
        drawn[name] = max(0.0, rng.normal(value, error)) * scale if value else 0.0
    knots = tuple((count, seconds * scale) for count, seconds in terms.sequence_knots)
    return StepTerms(**drawn, sequence_knots=knots)


def draw_residuals(q: Quantiles, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Relative residuals from their kept quantiles, linear between them and with half a piece more at either end.

    Few residuals know little of their tails, so their spread is widened by 1 + 2 / sqrt(count).
    """
    if not q.count:
        return np.zeros(shape)
    levels = np.asarray([0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0])
    low, high = q.p05 - 0.5 * (q.p25 - q.p05), q.p95 + 0.5 * (q.p95 - q.p75)
    values = np.asarray([low, q.p05, q.p25, q.p50, q.p75, q.p95, high])
    values = np.maximum(-0.95, q.p50 + (values - q.p50) * (1.0 + 2.0 / np.sqrt(q.count)))
    drawn: Array = np.interp(rng.random(shape), levels, values)
    return drawn


def _metrics(replayed: Sequence[object]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for metric in METRICS:
        values = [getattr(r, metric) for r in replayed]
        found[metric] = [float("nan") if value is None else float(value) for value in values]
    return found
