"""The fitter against models whose coefficients are known."""

from __future__ import annotations

import numpy as np
import pytest

from weighbridge.core.instance import StepTerms
from weighbridge.cost.fit import Observation, fit_steps
from weighbridge.cost.step import attended_tokens, decode_run_seconds, sequence_seconds, step_seconds

TRUE = StepTerms(base_s=0.011, prefill_s=4e-5, attend_s=3e-9, sequence_s=3e-5, kv_s=8e-8)
TERMS = ("base_s", "prefill_s", "attend_s", "sequence_s", "kv_s")


def _step(rng: np.random.Generator, terms: StepTerms, noise: float, *, saturated: bool = False) -> Observation:
    sequences = 128 if saturated else int(rng.integers(0, 129))
    prefill = 0 if rng.random() < 0.5 else int(rng.integers(1, 2048))
    attended = attended_tokens(int(rng.integers(0, 4000)), prefill)
    kv = sequences * (700 if saturated else int(rng.integers(50, 3000)))
    seconds = step_seconds(
        terms, prefill_tokens=prefill, attended_tokens=attended, sequences=sequences, kv_tokens=kv
    ) * float(rng.lognormal(0.0, noise))
    return Observation(
        seconds=seconds, sequences={sequences: 1.0}, prefill_tokens=prefill, attended_tokens=attended, kv_tokens=kv
    )


def test_recovers_known_coefficients_from_noisy_steps() -> None:
    rng = np.random.default_rng(1)
    fit = fit_steps([_step(rng, TRUE, 0.05) for _ in range(600)], terms=TERMS, rng=rng)
    for term in TERMS:
        error = abs(getattr(fit.terms, term) - getattr(TRUE, term))
        assert error < 4 * fit.errors[term], term
    assert fit.terms.base_s == pytest.approx(TRUE.base_s, rel=0.05)
    assert fit.terms.prefill_s == pytest.approx(TRUE.prefill_s, rel=0.05)
    assert fit.identifiable
    assert not fit.terms.sequence_knots


def test_residuals_are_of_observations_that_were_not_fitted() -> None:
    rng = np.random.default_rng(2)
    fit = fit_steps([_step(rng, TRUE, 0.05) for _ in range(500)], terms=TERMS, rng=rng, hold_out=0.2)
    residuals = fit.residuals["step"]
    assert len(residuals) == 100
    assert float(np.abs(residuals).mean()) == pytest.approx(0.04, abs=0.015)


def test_an_outlier_in_ten_moves_no_coefficient_by_more_than_a_tenth() -> None:
    rng = np.random.default_rng(3)
    observations = [_step(rng, TRUE, 0.02) for _ in range(500)]
    spoilt = [
        Observation(
            seconds=o.seconds * (4.0 if i % 10 == 0 else 1.0),
            sequences=o.sequences,
            prefill_tokens=o.prefill_tokens,
            attended_tokens=o.attended_tokens,
            kv_tokens=o.kv_tokens,
        )
        for i, o in enumerate(observations)
    ]
    fit = fit_steps(spoilt, terms=TERMS, rng=rng)
    for term in ("base_s", "prefill_s", "kv_s"):
        assert getattr(fit.terms, term) == pytest.approx(getattr(TRUE, term), rel=0.1), term


def test_saturated_steps_cannot_tell_base_from_sequences_and_the_verdict_says_so() -> None:
    rng = np.random.default_rng(4)
    fit = fit_steps([_step(rng, TRUE, 0.05, saturated=True) for _ in range(400)], terms=TERMS, rng=rng)
    assert not fit.identifiable
    assert {"base_s", "sequence_s"} <= set(fit.unidentified)
    forecast = step_seconds(fit.terms, sequences=128, kv_tokens=128 * 700)
    truth = step_seconds(TRUE, sequences=128, kv_tokens=128 * 700)
    assert forecast == pytest.approx(truth, rel=0.02), "the sum is known although its parts are not"


def test_a_term_without_any_work_is_named_and_left_at_zero() -> None:
    rng = np.random.default_rng(5)
    fit = fit_steps([_step(rng, TRUE, 0.02) for _ in range(100)], terms=(*TERMS, "scan_s"), rng=rng)
    assert fit.unidentified == ("scan_s",)
    assert fit.terms.scan_s == 0.0


def test_stairs_in_sequences_are_found_and_a_straight_line_is_left_alone() -> None:
    """Three rows at the price of one each, four at the price of three: kernels that take four rows at once."""
    stairs = StepTerms(
        base_s=0.009,
        prefill_s=2e-3,
        kv_s=1e-6,
        sequence_knots=((1.0, 0.003), (2.0, 0.015), (3.0, 0.027), (4.0, 0.028), (8.0, 0.065)),
    )
    rng = np.random.default_rng(6)
    rows = []
    for sequences in [0, 1, 2, 3, 4, 8] * 12:
        kv = sequences * int(rng.integers(50, 1000))
        prefill = 0 if sequences else int(rng.integers(8, 200))
        seconds = step_seconds(stairs, sequences=sequences, kv_tokens=kv, prefill_tokens=prefill)
        noisy = seconds * float(rng.lognormal(0.0, 0.02))
        rows.append(Observation(seconds=noisy, sequences={sequences: 1.0}, kv_tokens=kv, prefill_tokens=prefill))
    fit = fit_steps(rows, terms=("base_s", "prefill_s", "sequence_s", "kv_s"), rng=rng)
    assert [count for count, _ in fit.terms.sequence_knots] == [1, 2, 3, 4, 8]
    for sequences in (1, 2, 3, 4, 6, 8):
        fitted = fit.terms.base_s + sequence_seconds(fit.terms, sequences)
        assert fitted == pytest.approx(stairs.base_s + sequence_seconds(stairs, sequences), rel=0.06)
    assert fit.terms.base_s == pytest.approx(stairs.base_s, rel=0.15), "steps without decodes show the base"
    assert not fit_steps([_step(rng, TRUE, 0.05) for _ in range(300)], terms=TERMS, rng=rng).terms.sequence_knots


def test_too_few_or_impossible_observations_are_refused() -> None:
    rng = np.random.default_rng(7)
    with pytest.raises(ValueError, match="too few"):
        fit_steps([_step(rng, TRUE, 0.0)] * 5, terms=TERMS, rng=rng)
    zero = Observation(seconds=0.0, sequences={1: 1.0})
    with pytest.raises(ValueError, match="must be > 0"):
        fit_steps([zero] * 10, terms=("base_s",), rng=rng)


def test_the_curve_in_sequences_goes_on_with_its_last_slope_and_runs_in_closed_form() -> None:
    terms = StepTerms(base_s=0.01, prefill_s=1e-4, kv_s=1e-7, sequence_knots=((1.0, 0.01), (4.0, 0.013)))
    assert sequence_seconds(terms, 0) == 0.0
    assert sequence_seconds(terms, 2) == pytest.approx(0.011)
    assert sequence_seconds(terms, 8) == pytest.approx(0.017)
    steps = sum(step_seconds(terms, sequences=3, kv_tokens=600 + 3 * j) for j in range(50))
    assert decode_run_seconds(terms, sequences=3, kv_tokens=600, steps=50) == pytest.approx(steps, rel=1e-12)


def test_what_several_cost_each_other_is_no_outlier_beside_lone_probes_that_fit_exactly() -> None:
    """Prompts and lone decodes agree on base and sequence; wider batches, a minority, take longer than those say."""
    lone = [Observation(seconds=4e-3 + 5e-3 * p, sequences={0: 1.0}, prefill_tokens=p) for p in range(16, 80)]
    lone += [Observation(seconds=12e-3 * n, sequences={1: float(n)}) for n in range(1, 97)]
    wide = [Observation(seconds=46e-3 * n, sequences={4: float(n)}) for n in range(1, 33)]

    def of_four(least_spread: float) -> float:
        fit = fit_steps(
            [*lone, *wide],
            terms=("base_s", "prefill_s", "sequence_s"),
            rng=np.random.default_rng(1),
            hold_out=0.0,
            piecewise=False,
            least_spread=least_spread,
        )
        return fit.terms.base_s + 4 * fit.terms.sequence_s

    assert of_four(0.0) < 0.9 * 46e-3
    assert of_four(0.1) == pytest.approx(46e-3, rel=0.08)
