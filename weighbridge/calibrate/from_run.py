"""Calibrate from a recorded run: fit on its first requests, judge on the rest, make a profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from weighbridge.calibrate.engines import kept_of, kind_of, scheduling_of
from weighbridge.calibrate.fitting import METRICS, MetricError, RequestFit, compare, fit_requests, pairs
from weighbridge.calibrate.fitting import residual_quantiles as quantiles
from weighbridge.calibrate.replay import RecordedRequest
from weighbridge.core.errors import InputError
from weighbridge.core.instance import Limits, StepTerms
from weighbridge.cost.profile import Profile, Provenance
from weighbridge.cost.step import rates_of
from weighbridge.scheduling.scheduler import SchedulerConfig


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `calibrate --from` prints. The errors are over the requests that were not fitted, relative (0.01 is 1 %)."""

    source: str
    requests: int
    fit_first: int
    evaluated: int
    ttft_mape: float
    tpot_mape: float
    e2e_mape: float
    identifiable: bool
    unidentified: tuple[str, ...]
    condition_number: float
    step: StepTerms
    step_errors: dict[str, float]
    metrics: dict[str, MetricError]
    fitted_metrics: dict[str, MetricError]
    preemptions: int
    kv_blocks: int | None
    warnings: tuple[str, ...]


def calibrate_run(
    requests: Sequence[RecordedRequest],
    limits: Limits,
    told: Mapping[str, str],
    *,
    source: str,
    fit_first: int,
    seed: int = 0,
    progress: Callable[[float, float], None] = lambda done, total: None,
) -> tuple[RunReport, Profile, RequestFit]:
    """Fit and judge.

    Raises:
        InputError: `fit_first` leaves nothing to fit or nothing to judge.
    """
    if not 20 <= fit_first < len(requests):
        raise InputError(
            f"--fit-first is {fit_first}; with {len(requests)} requests it must be from 20 to {len(requests) - 1}, so "
            "that some are left to judge the fit by"
        )
    config = scheduling_of(kind_of(told.get("engine", "")), limits)
    rng = np.random.default_rng(seed)
    fitted = [index < fit_first for index in range(len(requests))]
    result = fit_requests(requests, config, fitted=fitted, rng=rng, progress=progress)
    rest = result.replayed[fit_first:]
    errors = compare(rest)
    warnings = []
    if limits.kv_blocks is None:
        warnings.append("KV capacity unknown, taken as ample: with a wrong capacity forecasts are 20-40 % off")
    if limits.token_budget is None or limits.max_sequences is None:
        warnings.append("token budget or maximum of sequences unknown; vLLM's usual 2048 and 256 taken")
    if not result.fit.identifiable:
        warnings.append(f"cannot tell apart from this run: {', '.join(result.fit.unidentified)}")
    report = RunReport(
        source=source,
        requests=len(requests),
        fit_first=fit_first,
        evaluated=len(rest),
        ttft_mape=errors["ttft_s"].mape,
        tpot_mape=errors["tpot_s"].mape,
        e2e_mape=errors["e2e_s"].mape,
        identifiable=result.fit.identifiable,
        unidentified=result.fit.unidentified,
        condition_number=result.fit.condition_number,
        step=result.fit.terms,
        step_errors=dict(result.fit.errors),
        metrics=errors,
        fitted_metrics=compare(result.replayed[:fit_first]),
        preemptions=sum(r.preemptions for r in result.replayed),
        kv_blocks=limits.kv_blocks,
        warnings=tuple(warnings),
    )
    return report, _profile(report, result, limits, told, config), result


def _profile(
    report: RunReport, result: RequestFit, limits: Limits, told: Mapping[str, str], config: SchedulerConfig
) -> Profile:
    rest = result.replayed[report.fit_first :]
    residuals = {
        metric: quantiles([observed / forecast - 1.0 for observed, forecast in pairs(rest, metric) if forecast > 0])
        for metric in METRICS
    }
    prompts = [r.request.prompt_tokens for r in result.replayed]
    outputs = [r.request.output_tokens for r in result.replayed]
    return Profile(
        rates=rates_of(result.fit.terms, token_budget=config.token_budget),
        step=result.fit.terms,
        step_errors=error_terms(result.fit.errors),
        identifiable=report.identifiable,
        unidentified=report.unidentified,
        limits=limits,
        scheduling=kept_of(config),
        residuals=residuals,
        ranges={
            "prompt_tokens": (float(min(prompts)), float(max(prompts))),
            "output_tokens": (float(min(outputs)), float(max(outputs))),
        },
        condition_number=report.condition_number,
        provenance=Provenance(
            engine=told.get("engine", ""),
            engine_version=told.get("engine_version", ""),
            model=told.get("model", ""),
            quantisation=told.get("quantisation", ""),
            device=told.get("device", ""),
            measured_at=told.get("measured_at", ""),
            method=f"replay of {report.source}, first {report.fit_first} of {report.requests} requests fitted",
        ),
    )


def error_terms(errors: Mapping[str, float]) -> StepTerms:
    """Standard errors in the shape of the coefficients; 0 for a term that was not fitted."""
    return StepTerms(
        base_s=errors.get("base_s", 0.0),
        prefill_s=errors.get("prefill_s", 0.0),
        attend_s=errors.get("attend_s", 0.0),
        sequence_s=errors.get("sequence_s", 0.0),
        kv_s=errors.get("kv_s", 0.0),
        scan_s=errors.get("scan_s", 0.0),
    )
