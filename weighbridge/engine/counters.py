"""What the engine counts as it runs: written by its own thread, read by the metrics page at any time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from weighbridge.engine.generation import FinalStats

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
LONG_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)


class Histogram:
    """Counts by upper bound, the last bucket being everything above. Written by one thread."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Counters:
    """Totals since the engine started. Seconds are wall time of the engine's thread."""

    __slots__ = (
        "decode_s",
        "decode_tokens",
        "e2e_s",
        "failures",
        "finished",
        "generation_tokens",
        "itl_s",
        "output_tokens",
        "place_s",
        "prefill_s",
        "prefill_tokens",
        "prefix_hits",
        "prefix_queries",
        "prompt_tokens",
        "queue_s",
        "request_decode_s",
        "request_prefill_s",
        "request_prompt_tokens",
        "step_tokens",
        "steps",
        "steps_s",
        "swap_bytes",
        "swap_s",
        "swaps",
        "transfer_bytes",
        "transfer_s",
        "transfers",
        "ttft_s",
    )

    def __init__(self) -> None:
        self.steps = 0
        self.steps_s = 0.0  # whole steps, Python included
        self.prefill_tokens = 0
        self.prefill_s = 0.0
        self.decode_tokens = 0
        self.decode_s = 0.0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.place_s = 0.0  # copying and cutting KV for prefix hits
        self.swaps = 0
        self.swap_bytes = 0
        self.swap_s = 0.0
        self.transfers = 0
        self.transfer_bytes = 0
        self.transfer_s = 0.0
        self.failures = 0
        self.finished: dict[str, int] = {}
        self.ttft_s = Histogram(SECONDS)
        self.itl_s = Histogram(SECONDS)
        self.e2e_s = Histogram(LONG_SECONDS)
        self.queue_s = Histogram(LONG_SECONDS)
        self.request_prefill_s = Histogram(LONG_SECONDS)
        self.request_decode_s = Histogram(LONG_SECONDS)
        self.request_prompt_tokens = Histogram(TOKENS)
        self.output_tokens = Histogram(TOKENS)
        self.step_tokens = Histogram(TOKENS)

    def note_end(self, stats: FinalStats) -> None:
        """Count a request that ended, however it ended."""
        self.finished[stats.finish_reason] = self.finished.get(stats.finish_reason, 0) + 1
        if stats.output_tokens == 0:
            return
        self.prompt_tokens += stats.prompt_tokens
        self.e2e_s.observe(stats.e2e_s)
        self.queue_s.observe(stats.queue_s)
        self.request_prefill_s.observe(stats.prefill_s)
        self.request_decode_s.observe(stats.decode_s)
        self.request_prompt_tokens.observe(stats.prompt_tokens)
        self.output_tokens.observe(stats.output_tokens)
