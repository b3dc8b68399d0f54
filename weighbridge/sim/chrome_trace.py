"""Simulated steps as a Chrome trace (chrome://tracing, Perfetto): one row per instance."""

from __future__ import annotations

import msgspec

from weighbridge.sim.instance import SimInstance
from weighbridge.sim.job import StepSpan


class ChromeTrace:
    """Collects spans; pass `record` as a simulation's `on_step`. Keeps at most `limit` spans, then drops the rest."""

    def __init__(self, limit: int = 200_000) -> None:
        self._events: list[dict[str, object]] = []
        self._rows: dict[str, int] = {}
        self._limit = limit
        self.dropped = 0

    def record(self, instance: SimInstance, span: StepSpan) -> None:
        """Take one step or jump."""
        if len(self._events) >= self._limit:
            self.dropped += 1
            return
        row = self._rows.setdefault(instance.name, len(self._rows))
        if span.prefill_tokens:
            name = f"prefill {span.prefill_tokens} + {span.decodes} decodes"
        else:
            name = f"{span.decodes} decodes" + (f" x {span.steps} steps" if span.steps > 1 else "")
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "pid": 0,
                "tid": row,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {
                    "steps": span.steps,
                    "decodes": span.decodes,
                    "prefill_tokens": span.prefill_tokens,
                    "kv_tokens": span.kv_tokens,
                    "waiting": span.waiting,
                },
            }
        )

    def encode(self) -> bytes:
        """The trace file's bytes."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}
            for name, row in self._rows.items()
        ]
        return msgspec.json.encode({"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"})
