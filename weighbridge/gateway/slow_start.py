"""How many requests at once a new instance is given: 1, then twice as many each fifth of the slow start, then no limit.

A new engine's cache is empty, its kernels may still be compiled, and its speed here is only a forecast: full load at
once would make the first requests pay for all of it together.
"""

from __future__ import annotations

STEPS = 5


def warm_limit(age_s: float, slow_start_s: float) -> int | None:
    """Requests at once for an instance that has been up for `age_s` of its `slow_start_s`; None once it is warm."""
    if age_s >= slow_start_s:
        return None
    return 1 << int(STEPS * age_s / slow_start_s)
