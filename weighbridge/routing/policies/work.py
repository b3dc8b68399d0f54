"""Outstanding work over measured rates.

    score = (prefill owed + own uncached prompt) / prefill rate + (decode owed + own budget) / decode rate

The sum is in seconds of isolated work. It ranks instances; it does not forecast when a batch completes, because
decoding sequences share steps.
"""

from __future__ import annotations

from weighbridge.core.instance import Rates
from weighbridge.routing.policy import Choice, Option, View, least

UNIT_RATES = Rates(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0)


class Work:
    """Least seconds of work. If any option has no rates, all are compared by tokens: the next degradation level."""

    length_estimate = "full_budget"

    def choose(self, view: View) -> Choice:
        """Pick the option with the least work, the request's own included."""
        options = view.options
        degraded = any(option.instance.spec.rates is None for option in options)
        pairs = [_work(option, UNIT_RATES if degraded else option.instance.spec.rates) for option in options]
        scores = [prefill + decode for prefill, decode in pairs]
        terms: list[dict[str, float]] = []
        if view.explain and not degraded:
            terms = [{"prefill_s": prefill, "decode_s": decode} for prefill, decode in pairs]
        note = "an instance has no calibrated rates: compared by tokens" if degraded else ""
        return Choice(least(scores, view.rng), scores, terms, note)


def _work(option: Option, rates: Rates | None) -> tuple[float, float]:
    if rates is None:
        raise ValueError(f"instance {option.instance.name} has no rates")
    instance = option.instance
    prefill = (instance.prefill_tokens + option.prefill_tokens) / rates.prefill_tokens_per_s
    decode = (instance.decode_tokens + option.decode_tokens) / rates.decode_tokens_per_s
    return prefill, decode
