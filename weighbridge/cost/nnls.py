"""Least squares with coefficients that are not negative: the active-set method of Lawson and Hanson (1974, ch. 23)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def nnls(matrix: Array, target: Array) -> Array:
    """The x >= 0 that minimises |matrix @ x - target|; `matrix` is (rows, columns), `target` (rows,).

    Columns should be of similar norm, else the tolerance of the optimality test means little.
    """
    columns = matrix.shape[1]
    solution = np.zeros(columns)
    free = np.zeros(columns, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(matrix.T @ target).max(initial=0.0)))
    for _ in range(3 * columns + 10):
        gradient = matrix.T @ (target - matrix @ solution)
        gradient[free] = -np.inf
        if free.all() or gradient.max(initial=-np.inf) <= tolerance:
            break
        free[int(gradient.argmax())] = True
        trial = _on_support(matrix, target, free)
        while free.any() and trial[free].min() <= 0.0:
            blocked = free & (trial <= 0.0)
            step = float((solution[blocked] / (solution[blocked] - trial[blocked])).min())
            solution = solution + step * (trial - solution)
            leaving = free & (solution <= 1e-14)
            leaving |= blocked & (solution <= solution[blocked].min())
            free &= ~leaving
            solution[~free] = 0.0
            trial = _on_support(matrix, target, free)
        solution = trial
    return np.maximum(solution, 0.0)


def _on_support(matrix: Array, target: Array, free: NDArray[np.bool_]) -> Array:
    trial = np.zeros(matrix.shape[1])
    if free.any():
        trial[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
    return trial
