"""Fit the step-time model to observed seconds: non-negative, scaled, robust least squares with a hold-out.

One observation is a number of seconds and the work of the steps that they were spent on. Seconds count by their
relative error, so that a short step weighs as much as a long one. Whether the data can tell the terms apart is
answered by collinearity diagnostics after Belsley, Kuh and Welsch (1980): two or more terms that have over half of
their variance in directions of a scaled condition index of 30 or more are known only in sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weighbridge.core.instance import StepTerms
from weighbridge.cost.nnls import nnls

Array = NDArray[np.float64]

COLLINEAR_INDEX = 30.0
PIECEWISE_GAIN = 0.05
"""Relative fall of the cross-validated error from which a curve in the number of sequences is believed."""
RIDGE = 1e-4
"""Of the squared length of a column: shrinks what the data determine by a ten-thousandth, and shares what they cannot
tell apart evenly among the terms in question, instead of giving all of it to one."""
HUBER = 1.345
"""In units of the robust spread: 95 % efficient on Gaussian noise (Huber 1964)."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Seconds, and what the steps in them held: sums over the steps of P, A, K and T*C of `weighbridge.cost.step`.

    `sequences` counts steps by their number of decoding sequences (0 included), so it sums to the number of steps.
    `requests` counts how many times the seconds include a request's fixed overhead outside any step.
    """

    seconds: float
    sequences: Mapping[int, float]
    prefill_tokens: float = 0.0
    attended_tokens: float = 0.0
    kv_tokens: float = 0.0
    scanned_tokens: float = 0.0
    requests: float = 0.0
    metric: str = "step"

    @property
    def steps(self) -> float:
        return sum(self.sequences.values())


@dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted model and how far to trust it. `errors` are one standard deviation, by term, in its unit.

    `residuals` are relative, observed / forecast - 1, by metric: on held-out observations where a hold-out was asked
    for, else on those fitted. `unidentified` names the terms that the data cannot tell apart or cannot see.
    """

    terms: StepTerms
    overhead_s: float
    errors: Mapping[str, float]
    condition_number: float
    unidentified: tuple[str, ...]
    residuals: Mapping[str, Array]
    observations: int
    design: Design
    solution: Array

    @property
    def identifiable(self) -> bool:
        """Whether every term that was asked for stands on its own."""
        return not self.unidentified


@dataclass(frozen=True, slots=True)
class Design:
    """Names of the terms, and the knots of the curve in sequences (empty: one straight line)."""

    terms: tuple[str, ...]
    knots: tuple[int, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """The term of each column; a curve has several columns of one term."""
        pieces = max(1, len(self.knots))
        return tuple(label for term in self.terms for label in (term,) * (pieces if term == "sequence_s" else 1))

    def matrix(self, observations: Sequence[Observation]) -> Array:
        """(observations, columns) of work; multiplied by the coefficients they are seconds."""
        columns: list[list[float]] = []
        for term in self.terms:
            if term == "sequence_s":
                lefts, rights = (0, *self.knots[:-1]), (*self.knots[:-1], None)
                columns += [
                    [_rise(o.sequences, left, right) for o in observations]
                    for left, right in zip(lefts, rights, strict=True)
                ]
            else:
                columns.append([float(getattr(o, _WORK[term])) for o in observations])
        return np.asarray(columns, dtype=np.float64).T

    def coefficients(self, values: Array) -> tuple[StepTerms, float]:
        """The model, and the overhead per request, that a solution stands for."""
        by_term: dict[str, list[float]] = {}
        for label, value in zip(self.labels, values, strict=True):
            by_term.setdefault(label, []).append(float(value))
        slopes = by_term.pop("sequence_s", [0.0])
        single = {term: found[0] for term, found in by_term.items()}
        overhead = single.pop("overhead_s", 0.0)
        knots: list[tuple[float, float]] = []
        left, seconds = 0, 0.0
        for knot, slope in zip(self.knots, slopes, strict=False):
            seconds += slope * (knot - left)
            left = knot
            knots.append((float(knot), seconds))
        sequence = seconds / left if left else slopes[0]
        terms = StepTerms(
            base_s=single.pop("base_s", 0.0),
            prefill_s=single.pop("prefill_s", 0.0),
            sequence_s=sequence,
            sequence_knots=tuple(knots),
            **single,
        )
        return terms, overhead


_WORK = {
    "base_s": "steps",
    "prefill_s": "prefill_tokens",
    "attend_s": "attended_tokens",
    "kv_s": "kv_tokens",
    "scan_s": "scanned_tokens",
    "overhead_s": "requests",
}


def _rise(sequences: Mapping[int, float], left: int, right: int | None) -> float:
    """Sum over steps of how far S reaches into the piece from `left` to `right`; the last piece has no end."""
    return sum(
        steps * ((count if right is None else min(count, right)) - left)
        for count, steps in sequences.items()
        if count > left
    )


def fit_steps(
    observations: Sequence[Observation],
    *,
    terms: Sequence[str] = ("base_s", "prefill_s", "attend_s", "sequence_s", "kv_s", "overhead_s"),
    rng: np.random.Generator,
    hold_out: float = 0.2,
    piecewise: bool | None = None,
    least_spread: float = 0.0,
) -> StepFit:
    """Fit the named terms. `piecewise` None lets cross-validation decide on the curve in sequences.

    Relative errors up to about `least_spread` are no outliers, however exactly the majority is met.

    A term of which no observation holds any work is left at 0 and named in `unidentified`.

    Raises:
        ValueError: fewer observations than terms, or seconds that are not positive.
    """
    if len(observations) < len(terms) + 2:
        raise ValueError(f"{len(observations)} observations are too few to fit {len(terms)} terms")
    if any(not (o.seconds > 0.0) for o in observations):
        raise ValueError("observed seconds must be > 0")
    straight = Design(tuple(terms))
    seen = np.abs(straight.matrix(observations)).sum(axis=0) > 0.0
    absent = tuple(term for term, any_work in zip(straight.labels, seen.tolist(), strict=True) if not any_work)
    design = Design(tuple(term for term in terms if term not in absent))
    knots = _knots(observations)
    if "sequence_s" in design.terms and len(knots) > 1 and piecewise is not False:
        curve = replace(design, knots=knots)
        if piecewise or _error_across(curve, observations, rng, least_spread) < (1 - PIECEWISE_GAIN) * _error_across(
            design, observations, rng, least_spread
        ):
            design = curve
    held = _held_out(len(observations), hold_out, rng)
    solution = solve(design, [o for o, out in zip(observations, held, strict=True) if not out], least_spread)
    judged = [o for o, out in zip(observations, held, strict=True) if out] or list(observations)
    residuals = residuals_by_metric(design, solution, judged)
    if held.any():
        solution = solve(design, observations, least_spread)
    return _report(design, solution, observations, residuals, absent)


def solve(design: Design, observations: Sequence[Observation], least_spread: float = 0.0) -> Array:
    """Coefficients in seconds, one per column; robust against a minority of outliers."""
    matrix, seconds = _relative(design, observations)
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0.0] = 1.0
    scaled = matrix / scale
    weights = np.ones(len(seconds))
    ridge = np.sqrt(RIDGE) * np.eye(matrix.shape[1])
    solution = np.zeros(matrix.shape[1])
    for _ in range(8):
        root = np.sqrt(weights)
        rows = np.vstack([scaled * root[:, None], ridge])
        previous, solution = solution, nnls(rows, np.concatenate([root, np.zeros(len(ridge))]))
        if np.allclose(previous, solution, rtol=1e-6, atol=0.0):
            break
        error = np.abs(scaled @ solution - 1.0)
        spread = max(1.4826 * float(np.median(error)), least_spread, 1e-9)
        weights = np.minimum(1.0, HUBER * spread / np.maximum(error, 1e-12))
    result: Array = solution / scale
    return result


def predict(design: Design, solution: Array, observations: Sequence[Observation]) -> Array:
    """Forecast seconds of each observation."""
    forecast: Array = np.dot(design.matrix(observations), solution)
    return forecast


def residuals_by_metric(design: Design, solution: Array, observations: Sequence[Observation]) -> dict[str, Array]:
    """Relative residuals, observed / forecast - 1, by the metric of the observation."""
    forecast = predict(design, solution, observations)
    found: dict[str, list[float]] = {}
    for o, value in zip(observations, forecast, strict=True):
        found.setdefault(o.metric, []).append(o.seconds / max(float(value), 1e-12) - 1.0)
    return {metric: np.asarray(values) for metric, values in sorted(found.items())}


def _relative(design: Design, observations: Sequence[Observation]) -> tuple[Array, Array]:
    seconds = np.asarray([o.seconds for o in observations])
    return design.matrix(observations) / seconds[:, None], seconds


def _held_out(count: int, share: float, rng: np.random.Generator) -> NDArray[np.bool_]:
    held = np.zeros(count, dtype=bool)
    held[rng.permutation(count)[: int(share * count)]] = True
    return held


def _knots(observations: Sequence[Observation]) -> tuple[int, ...]:
    """Ends of the pieces of the curve in sequences, each with at least two observations that spend most steps in it.

    Kernels for few rows make stairs there (three rows at the price of one each, four at the price of three), so small
    numbers are told apart singly.
    """
    typical = sorted(
        max(o.sequences, key=lambda count: (o.sequences[count], count)) for o in observations if max(o.sequences) > 0
    )
    most = max(typical, default=0)
    knots: list[int] = []
    left = 0
    for edge in _edges():
        if left >= most:
            break
        if sum(left < count <= edge for count in typical) >= 2:
            knots.append(edge)
            left = edge
        elif edge >= most:
            break
    return tuple(knots)


def _edges() -> Iterator[int]:
    """1 to 8 one by one, then 12, 16, 24, 32, 48 and so on."""
    yield from range(1, 8)
    edge = 8
    while True:
        yield edge
        yield edge + edge // 2
        edge *= 2


def _error_across(
    design: Design,
    observations: Sequence[Observation],
    rng: np.random.Generator,
    least_spread: float,
    folds: int = 5,
) -> float:
    """Mean absolute relative error, each observation forecast by a fit that did not see it.

    Where decoding was observed apart, that alone is judged: it is what a curve in the number of sequences is about.
    """
    decoding = [o.metric == "tpot_s" for o in observations]
    judged = decoding if sum(decoding) >= folds else [True] * len(observations)
    order = rng.permutation(len(observations))
    errors: list[float] = []
    for fold in range(folds):
        out = set(order[fold::folds].tolist())
        solution = solve(design, [o for i, o in enumerate(observations) if i not in out], least_spread)
        held = [observations[i] for i in sorted(out) if judged[i]]
        for values in residuals_by_metric(design, solution, held).values():
            errors.extend(np.abs(values).tolist())
    return float(np.mean(errors))


def _report(
    design: Design,
    solution: Array,
    observations: Sequence[Observation],
    residuals: Mapping[str, Array],
    absent: tuple[str, ...],
) -> StepFit:
    matrix, _ = _relative(design, observations)
    condition, tangled = _collinear(matrix, design.labels)
    terms, overhead = design.coefficients(solution)
    return StepFit(
        terms=terms,
        overhead_s=overhead,
        errors=_standard_errors(design, matrix, solution),
        condition_number=condition,
        unidentified=tuple(sorted({*absent, *tangled})),
        residuals=residuals,
        observations=len(observations),
        design=design,
        solution=solution,
    )


def _standard_errors(design: Design, matrix: Array, solution: Array) -> dict[str, float]:
    """One standard deviation per term; of a curve in sequences, that of its value at the last knot per sequence."""
    rows, columns = matrix.shape
    residual = matrix @ solution - 1.0
    variance = float(residual @ residual) / max(1, rows - columns)
    covariance = variance * np.linalg.pinv(matrix.T @ matrix)
    errors: dict[str, float] = {}
    for term in design.terms:
        picked = np.asarray([label == term for label in design.labels], dtype=np.float64)
        if term == "sequence_s" and design.knots:
            edges = np.asarray((0, *design.knots), dtype=np.float64)
            picked[picked > 0] = np.diff(edges) / edges[-1]
        errors[term] = float(np.sqrt(max(0.0, float(picked @ covariance @ picked))))
    return errors


def _collinear(matrix: Array, labels: Sequence[str]) -> tuple[float, set[str]]:
    """Condition number of the columns at unit length, and the terms tangled in a near dependency."""
    norms = np.linalg.norm(matrix, axis=0)
    _, singular, right = np.linalg.svd(matrix / norms, full_matrices=False)
    singular = np.maximum(singular, singular[0] * 1e-12)
    share = (right.T**2) / singular**2
    share /= share.sum(axis=1, keepdims=True)
    near = singular[0] / singular >= COLLINEAR_INDEX
    tangled = {labels[int(column)] for column in np.flatnonzero(share[:, near].sum(axis=1) > 0.5)}
    return float(singular[0] / singular[-1]), tangled if len(tangled) > 1 else set()
