"""Our non-negative least squares against SciPy's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls as reference

from weighbridge.cost.nnls import nnls


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(4, 40), columns=st.integers(1, 8), positive=st.booleans())
def test_residual_equals_the_reference(seed: int, rows: int, columns: int, positive: bool) -> None:
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(rows, columns))
    if positive:
        matrix = np.abs(matrix)
    target = rng.normal(size=rows)
    found, expected = nnls(matrix, target), reference(matrix, target)[0]
    assert found.min() >= 0.0
    assert np.linalg.norm(matrix @ found - target) <= np.linalg.norm(matrix @ expected - target) + 1e-8
