"""Settings of the whole process that a long-running gateway wants."""

from __future__ import annotations

import gc


def tune_collector() -> None:
    """Collect less often, and never look at what exists now: a gateway makes short-lived objects and few cycles."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
