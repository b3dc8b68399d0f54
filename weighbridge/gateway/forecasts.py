"""How well were the forecasts? Observed over forecast, as histograms per instance.

Ended requests are only noted on the request path; a few hundred a second of them are compared a quarter of a second
later, so the histograms are a sample when there is more traffic than that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import Metric

from weighbridge.gateway.stats import Family

if TYPE_CHECKING:
    from weighbridge.gateway.records import DecisionRecord

MOST = 200
LEAST_S = 1e-4  # a forecast below this is no measure
BOUNDS = (0.1, 0.25, 0.4, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 2.5, 4.0, 10.0)


class Forecasts:
    """Compares what policies forecast in seconds (to the first token, and per output token) with the outcome."""

    def __init__(self) -> None:
        one = ("instance",)
        self.ttft = Family(
            "weighbridge_forecast_ttft_ratio", "Observed over forecast time from dispatch to first token.", one, BOUNDS
        )
        self.tpot = Family(
            "weighbridge_forecast_tpot_ratio", "Observed over forecast time per output token.", one, BOUNDS
        )
        self._pending: list[DecisionRecord] = []

    def note(self, record: DecisionRecord) -> None:
        """A decided request has ended; looked at later."""
        if len(self._pending) < MOST:
            self._pending.append(record)

    def digest(self) -> None:
        """Compares what was noted; call it a few times a second."""
        pending, self._pending = self._pending, []
        for record in pending:
            self._compare(record)

    def collect(self) -> Iterator[Metric]:
        """Prometheus families."""
        yield self.ttft.metric()
        yield self.tpot.metric()

    def _compare(self, record: DecisionRecord) -> None:
        outcome, chosen, terms = record.outcome, record.chosen, record.terms
        if outcome is None or outcome.outcome != "ok" or outcome.ttft_s is None:
            return
        first_s = terms.get("wait_s", 0.0) + terms.get("prefill_s", 0.0) + terms.get("transfer_s", 0.0)
        if "wait_s" in terms and first_s >= LEAST_S:
            self.ttft.observe((chosen,), max(0.0, outcome.ttft_s - record.queued_s) / first_s)
        tpot_s = terms.get("tpot_s", 0.0)
        if tpot_s >= LEAST_S and outcome.output_tokens > 1:
            observed_s = (outcome.e2e_s - outcome.ttft_s) / (outcome.output_tokens - 1)
            self.tpot.observe((chosen,), observed_s / tpot_s)
