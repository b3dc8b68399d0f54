"""How good choices were: score and cost, paired bootstrap against other choices, and the weak/strong curve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from weighbridge.selection.decision import Constraints, Mode
from weighbridge.selection.selector import Selector
from weighbridge.selection.suites import Cases
from weighbridge.selection.train import Dataset

Indices = NDArray[np.int64]
Vector = NDArray[np.float64]
RESAMPLES = 2000
Progress = Callable[[str, int, int], None]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Mean score in points (0..100) and summed cost of one way of choosing, over the same cases."""

    avg_score: float
    cost_usd: float


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """Mean score difference (ours minus theirs, points) with its 95 % bootstrap interval over cases."""

    difference: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Routed:
    """The chosen column of every case, and whether the case was taken for a known family."""

    chosen: Indices
    known: NDArray[np.bool_]


def route(
    selector: Selector,
    cases: Cases,
    mode: Mode,
    constraints: Constraints | None = None,
    progress: Progress | None = None,
) -> Routed:
    """Decide every case with the selector as a gateway would."""
    column = {model: i for i, model in enumerate(cases.models)}
    chosen = np.empty(len(cases.texts), np.int64)
    known = np.empty(len(cases.texts), np.bool_)
    for i, text in enumerate(cases.texts):
        decision = selector.decide([{"role": "user", "content": text}], (), mode, constraints)
        chosen[i], known[i] = column[decision.model], decision.known
        if progress and i % 200 == 0:
            progress("decide", i, len(cases.texts))
    return Routed(chosen, known)


def result(cases: Cases, chosen: Indices) -> Result:
    """Score and cost of these choices; a case without a known cost counts as free, as the published tables do."""
    rows = np.arange(len(chosen))
    return Result(
        avg_score=round(100.0 * float(cases.scores[rows, chosen].mean()), 2),
        cost_usd=round(float(np.nansum(cases.costs_usd[rows, chosen])), 2),
    )


def paired(cases: Cases, ours: Indices, theirs: Indices, seed: int = 0) -> Paired:
    """Resample cases with replacement; both choices are read on the same resample."""
    rows = np.arange(len(ours))
    gaps = 100.0 * (cases.scores[rows, ours] - cases.scores[rows, theirs])
    generator = np.random.default_rng(seed)
    means = np.array([gaps[generator.integers(0, len(gaps), len(gaps))].mean() for _ in range(RESAMPLES)])
    low, high = np.quantile(means, [0.025, 0.975])
    return Paired(difference=round(float(gaps.mean()), 2), low=round(float(low), 2), high=round(float(high), 2))


def single(cases: Cases, model: str) -> Indices:
    """Always the same model."""
    return np.full(len(cases.texts), cases.models.index(model), np.int64)


def oracle(cases: Cases) -> Indices:
    """The best model of every case, the cheapest among equals: the ceiling that no router can pass."""
    costs = np.nan_to_num(cases.costs_usd, nan=np.inf)
    best = cases.scores >= cases.scores.max(1, keepdims=True)
    cheapest: Indices = np.where(best, costs, np.inf).argmin(1)
    return np.where(np.isfinite(costs).any(1), cheapest, cases.scores.argmax(1))


def by_true_label(cases: Cases, training: Dataset, success_usd: float, costs: Vector) -> Indices:
    """Choose by the case's true family: the best of training means times `success_usd` minus mean cost.

    `costs` is rows x models of the training rows. A family not seen in training gets the overall mean.
    """
    table: dict[str, int] = {}
    names = np.array(training.families)
    utility = success_usd * training.scores - costs
    overall = int(np.nanmean(utility, 0).argmax())
    for name in sorted(set(training.families)):
        table[name] = int(np.nanmean(utility[names == name], 0).argmax())
    return np.array([table.get(family, overall) for family in cases.families], np.int64)


def random_result(cases: Cases) -> Result:
    """The expectation of a uniform choice, exact."""
    return Result(
        avg_score=round(100.0 * float(cases.scores.mean()), 2),
        cost_usd=round(float(np.nansum(cases.costs_usd, 0).mean()), 2),
    )


@dataclass(frozen=True, slots=True)
class ShareCurve:
    """Share of calls to the strong model (0..1) against the share of its lead that is recovered (PGR)."""

    share: Vector
    recovered: Vector

    @property
    def apgr(self) -> float:
        """Area under the curve: 0.5 for a random order."""
        return float(np.trapezoid(self.recovered, self.share))

    def cpt(self, wanted: float) -> float:
        """Least share of strong calls, percent, that recovers `wanted` of the lead."""
        return 100.0 * float(self.share[int(np.argmax(self.recovered >= wanted))])


def share_curve(gains: Vector, weak: Vector, strong: Vector) -> ShareCurve:
    """Send the cases with the largest predicted `gains` to the strong model first; scores are per case."""
    order = np.argsort(-gains, kind="stable")
    lead = (strong - weak)[order]
    recovered = np.concatenate([[0.0], np.cumsum(lead)]) / lead.sum()
    return ShareCurve(np.linspace(0.0, 1.0, len(recovered)), recovered)
