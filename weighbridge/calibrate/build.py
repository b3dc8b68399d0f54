"""From a measurement to a profile: fit on the grid, judge on the random requests that were held out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from weighbridge.calibrate.engines import kept_of, scheduling_of
from weighbridge.calibrate.fitting import METRICS, TERMS, RequestFit, fit_requests, pairs, residual_quantiles
from weighbridge.calibrate.from_run import error_terms
from weighbridge.calibrate.measure import Measurement
from weighbridge.calibrate.probe import ProbeResult
from weighbridge.calibrate.replay import Replayed
from weighbridge.calibrate.stages import HELD_OUT
from weighbridge.core.errors import InputError
from weighbridge.core.instance import Limits, StepTerms
from weighbridge.cost.profile import Profile, Provenance, Quantiles
from weighbridge.cost.step import rates_of
from weighbridge.scheduling.scheduler import SchedulerConfig

LEAST_REQUESTS = 24
SPREAD = 0.1
"""Lone probes on a quiet engine fit to a few per cent; what several cost each other is no noise beside them."""
POOR = 0.15
"""Median error of held-out requests from which a calibration is said to have gone wrong."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile and what it rests on. `fitted` says of each replayed request whether it was fitted or held out."""

    profile: Profile
    replayed: Sequence[Replayed]
    fitted: Sequence[bool]
    stages: Sequence[str]
    warnings: tuple[str, ...]


def build_profile(found: Measurement, provenance: Provenance, *, seed: int = 0) -> Calibration:
    """Fit and describe.

    Raises:
        InputError: too few probes ended well for any fit.
    """
    if len(found.results) < LEAST_REQUESTS:
        raise InputError(
            f"{found.endpoint.url}: only {len(found.results)} probes ended, and {LEAST_REQUESTS} are needed for a fit; "
            "give more time by --budget"
        )
    limits, warnings = _limits(found)
    results = sorted(found.results, key=lambda r: r.sent_s)
    fitted = _fitted(results, seed)
    config = _settled(scheduling_of(found.endpoint.kind, limits, found.endpoint.scheduler), results, found)
    zero = results[0].sent_s
    requests = [r.record(index, zero) for index, r in enumerate(results)]
    result = fit_requests(
        requests,
        config,
        fitted=fitted,
        rng=np.random.default_rng(seed),
        terms=(*TERMS, "overhead_s"),
        start=_start(results),
        piecewise=None,
        least_spread=SPREAD,
    )
    judged = [r for r, was in zip(result.replayed, fitted, strict=True) if not was]
    residuals = {metric: _residuals(judged, metric) for metric in METRICS}
    warnings += _verdicts(found, result, residuals)
    profile = Profile(
        rates=rates_of(result.fit.terms, token_budget=config.token_budget),
        step=result.fit.terms,
        step_errors=error_terms(result.fit.errors),
        overhead_s=result.fit.overhead_s,
        identifiable=result.fit.identifiable,
        unidentified=result.fit.unidentified,
        limits=limits,
        scheduling=kept_of(config),
        residuals=residuals,
        ranges=_ranges(results),
        condition_number=result.fit.condition_number,
        provenance=provenance,
        extra=_extra(found, fitted),
    )
    return Calibration(profile, result.replayed, fitted, [r.stage for r in results], tuple(warnings))


def _limits(found: Measurement) -> tuple[Limits, list[str]]:
    """The engine's limits, completed by what was seen, and a warning for each that is assumed."""
    limits, warnings = found.endpoint.limits, []
    told = limits.max_sequences
    if found.queued_while_free and found.most_running:
        seen = found.most_running
        if told is not None and told != seen:
            warnings.append(
                f"the engine tells {told} sequences, but at most {seen} ran while others waited; took {seen}"
            )
        limits = msgspec.structs.replace(limits, max_sequences=seen)
    elif told is None:
        warnings.append("the maximum of sequences is not told and no queue formed; give it by --max-sequences")
    if limits.token_budget is None:
        warnings.append("the token budget is not told, 2048 assumed; give it by --token-budget")
    if limits.kv_blocks is None:
        warnings.append("the KV capacity is not told, taken as ample; give it by --kv-blocks")
    return limits, warnings


def _fitted(results: Sequence[ProbeResult], seed: int) -> list[bool]:
    """The held-out stage judges the fit; without it, a random quarter of the grid does."""
    fitted = [r.stage != HELD_OUT for r in results]
    if all(fitted):
        for index in random.Random(seed).sample(range(len(results)), len(results) // 4):
            fitted[index] = False
    return fitted


def _settled(config: SchedulerConfig, results: Sequence[ProbeResult], found: Measurement) -> SchedulerConfig:
    """An engine that bounds its steps in seconds cuts prompts accordingly; that depends on its speed."""
    longest_s = found.endpoint.scheduler.get("max_step_s")
    if not isinstance(longest_s, (int, float)) or longest_s <= 0:
        return config
    alone = [r for r in results if r.stage == "alone" and r.prompt_tokens >= 64]
    if not alone:
        return config
    per_token = float(np.median([r.ttft_s / r.prompt_tokens for r in alone]))
    rows = config.prefill_rows
    most = max(rows, int(longest_s / per_token) // rows * rows)
    return replace(config, prefill_limit=min(config.token_budget, most))


def _start(results: Sequence[ProbeResult]) -> StepTerms:
    """A first guess from requests that were alone."""
    alone = [r for r in results if r.stage in ("alone", "decode-1")] or list(results)
    step = float(np.median([r.tpot_s for r in alone if r.tpot_s is not None] or [0.02]))
    prefill = float(np.median([r.ttft_s / r.prompt_tokens for r in alone]))
    return StepTerms(base_s=0.6 * step, prefill_s=prefill, sequence_s=0.3 * step, kv_s=1e-4 * step)


def _residuals(judged: Sequence[Replayed], metric: str) -> Quantiles:
    return residual_quantiles(
        [observed / forecast - 1.0 for observed, forecast in pairs(judged, metric) if forecast > 0]
    )


def _verdicts(found: Measurement, result: RequestFit, residuals: Mapping[str, Quantiles]) -> list[str]:
    warnings = []
    off = residuals["e2e_s"]
    if off.count and off.median > POOR:
        warnings.append(
            f"the {off.count} requests that were held out took {1 + off.p50:.2f} times their forecast in the median "
            f"(error {off.median:.0%}): something else used the machine, or the engine's speed changed meanwhile; "
            "calibrate again when it is quiet"
        )
    if not result.fit.identifiable:
        warnings.append(f"the probes cannot tell apart: {', '.join(result.fit.unidentified)}")
    if found.missing:
        warnings.append(f"not measured for lack of time: {', '.join(found.missing)}")
    if found.interrupted:
        warnings.append("interrupted: the profile rests on what was measured until then")
    if found.under_load:
        warnings.append("the engine served others meanwhile: the profile is of this engine under that load")
    if found.failures:
        warnings.append(f"{len(found.failures)} probes failed and were left out, the first: {found.failures[0]}")
    return warnings


def _ranges(results: Sequence[ProbeResult]) -> dict[str, tuple[float, float]]:
    prompts, outputs = [r.prompt_tokens for r in results], [r.output_tokens for r in results]
    widths = [int(r.stage.split("-")[1]) for r in results if r.stage.startswith("decode-")] or [1]
    return {
        "prompt_tokens": (float(min(prompts)), float(max(prompts))),
        "output_tokens": (float(min(outputs)), float(max(outputs))),
        "sequences": (1.0, float(max(widths))),
    }


def _extra(found: Measurement, fitted: Sequence[bool]) -> dict[str, object]:
    extra: dict[str, object] = {
        "probes": len(found.results),
        "fitted": sum(fitted),
        "held_out": len(fitted) - sum(fitted),
        "failed": len(found.failures),
        "rounds": found.rounds,
        "seconds": found.seconds,
        "missing": list(found.missing),
    }
    if found.cold is not None:
        extra["cold_first_request_s"] = found.cold.ttft_s
    if found.repeat_cold is not None and found.repeat_warm is not None:
        extra["prefix_repeat"] = {
            "prompt_tokens": found.repeat_warm.prompt_tokens,
            "cached_tokens": found.repeat_warm.cached_tokens,
            "cold_ttft_s": found.repeat_cold.ttft_s,
            "warm_ttft_s": found.repeat_warm.ttft_s,
        }
    return extra
