"""Ridge regression on text features, solved in the space of rows, with exact leave-one-out predictions.

With Gram matrix G, penalty p and targets y about their prior m: a = (G + pI)^-1 (y - m), weights w = X^T a, and the
prediction for row i without row i is y_i - a_i / [(G + pI)^-1]_ii (the usual leave-one-out identity for a fixed m).
The penalty shrinks every model to its own prior: a text that shares nothing with the training texts gets exactly m.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weighbridge.selection.rows import Rows

# how good left-out predictions (rows x models) are, one error per row; smaller is better
RowErrors = Callable[["Matrix", "Matrix"], "Matrix"]

Matrix = NDArray[np.float64]
PENALTIES = (1.0, 3.0, 10.0, 30.0)
PRIOR_ROWS = 5.0


@dataclass(frozen=True, slots=True)
class Ridge:
    """`weights` width x models, `prior` one per model, `left_out` rows x models (NaN where there was no label)."""

    weights: Matrix
    prior: Matrix
    left_out: Matrix
    penalty: float
    error: float


def shrunk_means(targets: Matrix) -> Matrix:
    """Mean per column over its labels, drawn to the mean of the columns as if by PRIOR_ROWS rows."""
    known = ~np.isnan(targets)
    counts = known.sum(0)
    sums = np.where(known, targets, 0.0).sum(0)
    centre = sums.sum() / max(1, counts.sum())
    means: Matrix = (sums + PRIOR_ROWS * centre) / (counts + PRIOR_ROWS)
    return means


def squared_errors(left_out: Matrix, targets: Matrix) -> Matrix:
    """Mean squared error of each row over its labelled models."""
    known = ~np.isnan(targets)
    total = np.where(known, (left_out - targets) ** 2, 0.0).sum(1)
    errors: Matrix = total[known.any(1)] / known.sum(1)[known.any(1)]
    return errors


def fit_ridge(
    rows: Rows,
    gram: Matrix,
    targets: Matrix,
    penalties: tuple[float, ...] = PENALTIES,
    errors: RowErrors = squared_errors,
) -> Ridge:
    """Fit one column per model with the largest penalty whose left-out error is within a standard error of the best.

    Args:
        rows: the encoded texts, n of them.
        gram: n x n dot products of `rows` with themselves.
        targets: n x models, NaN where unknown.
        penalties: tried in this order, ascending.
        errors: what is compared, from left-out predictions and targets.
    """
    prior = shrunk_means(targets)
    tried = [(penalty, *_solve(gram, targets, prior, penalty)) for penalty in penalties]
    scored = [errors(left_out, targets) for _, _, left_out in tried]
    best = min(scored, key=lambda e: float(e.mean()))
    allowed = float(best.mean() + best.std() / np.sqrt(best.size))
    chosen = max(i for i, e in enumerate(scored) if float(e.mean()) <= allowed)
    penalty, dual, left_out = tried[chosen]
    return Ridge(rows.weighted_sum(dual), prior, left_out, penalty, float(scored[chosen].mean()))


def _solve(gram: Matrix, targets: Matrix, prior: Matrix, penalty: float) -> tuple[Matrix, Matrix]:
    dual = np.zeros_like(targets)
    left_out = np.full_like(targets, np.nan)
    known = ~np.isnan(targets)
    # columns with the same labelled rows share one inverse; complete tables need just one
    patterns: dict[bytes, list[int]] = {}
    for column in range(targets.shape[1]):
        patterns.setdefault(known[:, column].tobytes(), []).append(column)
    for columns in patterns.values():
        used = np.flatnonzero(known[:, columns[0]])
        if not used.size:
            continue
        inverse = np.linalg.inv(gram[np.ix_(used, used)] + penalty * np.eye(used.size))
        place = np.ix_(used, np.array(columns))
        solved = inverse @ (targets[place] - prior[columns])
        dual[place] = solved
        left_out[place] = targets[place] - solved / np.diag(inverse)[:, None]
    return dual, left_out
