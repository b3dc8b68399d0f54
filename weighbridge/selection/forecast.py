"""What the heads say about one request, before anything is filtered or compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Per candidate of the pool: chance with and without feedback, output and input tokens, cost in USD."""

    quality: Vector
    untaught: Vector
    output_tokens: Vector
    input_tokens: Vector
    cost_usd: Vector
    known: bool
    familiarity: float
