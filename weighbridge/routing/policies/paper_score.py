"""The weighted score of arXiv:2609.16206, whose weights are set by hand and whose time constants are fitted.

    cost = w_b * backlog * sigma + w_s * work * (1 + rho * press) * sigma + w_q * queue

backlog: seconds of outstanding prefill and decode work; work: own uncached prompt and expected output, in seconds;
press: KV use after admission; sigma = 1 / the tier's first-token bound; queue: requests the engine reports as waiting.
"""

from __future__ import annotations

from weighbridge.core.instance import Rates
from weighbridge.routing.fleet import Instance
from weighbridge.routing.policy import Choice, Option, View, least

DEFAULT_SLO_S = 1.0
UNIT = Rates(prefill_tokens_per_s=1.0, decode_tokens_per_s=1.0)


class PaperScore:
    """Least weighted additional completion time. Without rates for all options, the same in tokens."""

    def __init__(self, backlog: float = 1.0, service: float = 1.0, queue: float = 0.05, pressure: float = 1.0) -> None:
        self.backlog = backlog
        self.service = service
        self.queue = queue
        self.pressure = pressure

    def choose(self, view: View) -> Choice:
        """Pick the least score."""
        known = all(option.instance.spec.rates is not None for option in view.options)
        sigma = 1.0 / max(view.tier.ttft_s or DEFAULT_SLO_S, 0.05)
        scores = [self._score(view, option, sigma, known) for option in view.options]
        return Choice(least(scores, view.rng), scores, note="" if known else "no rates: compared by tokens")

    def _score(self, view: View, option: Option, sigma: float, known: bool) -> float:
        instance = option.instance
        rates = (instance.spec.rates if known else None) or UNIT
        backlog = _seconds(rates, instance.prefill_tokens, instance.decode_tokens)
        own = _seconds(rates, option.prefill_tokens, option.decode_tokens)
        press = _press_after(instance, view.request.prompt_tokens + option.decode_tokens)
        waiting = (instance.report.waiting or 0) if instance.report is not None else 0
        return (
            self.backlog * backlog * sigma
            + self.service * own * (1.0 + self.pressure * press) * sigma
            + self.queue * waiting
        )


def _seconds(rates: Rates, prefill_tokens: int, decode_tokens: int) -> float:
    return prefill_tokens / rates.prefill_tokens_per_s + decode_tokens / rates.decode_tokens_per_s


def _press_after(instance: Instance, tokens: int) -> float:
    capacity = instance.spec.limits.kv_tokens
    return (instance.kv_tokens + tokens) / capacity if capacity else 0.0
