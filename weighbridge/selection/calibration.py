"""Scores to probabilities: one logistic curve per model, p = 1 / (1 + exp(-(slope * score + offset))).

Fitted on left-out predictions by penalised likelihood (soft labels in 0..1 are fine), drawn to the curve of all
models together, so a model with few labels borrows from the rest.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
STRENGTH = 4.0
BINS = 10


def logistic(values: Matrix) -> Matrix:
    out: Matrix = 1.0 / (1.0 + np.exp(np.minimum(np.maximum(-values, -30.0), 30.0)))
    return out


def fit_curves(scores: Matrix, labels: Matrix) -> Matrix:
    """Slope and offset per model (models x 2) from rows x models of left-out scores and labels in 0..1."""
    known = ~(np.isnan(scores) | np.isnan(labels))
    start = np.array([4.0, -2.0])
    common = _newton(scores[known], labels[known], start, strength=0.01)
    columns = range(scores.shape[1])
    return np.stack([_newton(scores[known[:, c], c], labels[known[:, c], c], common, STRENGTH) for c in columns])


def _newton(scores: Matrix, labels: Matrix, start: Matrix, strength: float, steps: int = 25) -> Matrix:
    """Maximise the likelihood minus strength/2 * |parameters - start|^2."""
    design = np.stack([scores, np.ones_like(scores)], 1)
    current = start.astype(float).copy()
    for _ in range(steps):
        chance = logistic(design @ current)
        slope = design.T @ (labels - chance) - strength * (current - start)
        bend = (design * (chance * (1 - chance))[:, None]).T @ design + strength * np.eye(2)
        move = np.linalg.solve(bend, slope)
        current = current + np.clip(move, -5.0, 5.0)
        if float(np.abs(move).max()) < 1e-9:
            break
    return current


def apply_curves(curves: Matrix, scores: Matrix) -> Matrix:
    """Probabilities of the same shape as `scores` (rows x models, or models)."""
    return logistic(scores * curves[:, 0] + curves[:, 1])


def calibration_error(chances: Matrix, labels: Matrix) -> float:
    """Expected calibration error over BINS bins of equal width, all models together."""
    known = ~(np.isnan(chances) | np.isnan(labels))
    p, y = chances[known], labels[known]
    if not p.size:
        return float("nan")
    bins = np.minimum((p * BINS).astype(int), BINS - 1)
    gaps = [abs(float(p[bins == b].mean() - y[bins == b].mean())) * int((bins == b).sum()) for b in np.unique(bins)]
    return sum(gaps) / p.size
