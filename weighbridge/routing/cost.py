"""An instance's step-time model as the router uses it: plain numbers, corrected online.

A profile that knows only two rates stands for a model with a base and a prefill term. `prefill_scale` and
`decode_scale` are what live traffic says about the profile; see `correction.py`.
"""

from __future__ import annotations

from weighbridge.core.instance import InstanceSpec, StepTerms
from weighbridge.cost.step import sequence_seconds

DEFAULT_BUDGET = 2_048
UNKNOWN_ERROR = 0.3


class Cost:
    """Seconds per unit of work, and the limits that bound a step."""

    __slots__ = (
        "attend_s",
        "base_s",
        "budget",
        "capacity",
        "changes",
        "decode_scale",
        "error",
        "knotted",
        "kv_s",
        "prefill_s",
        "prefill_scale",
        "seen",
        "sequence_s",
        "terms",
        "transfer_latency_s",
        "transfer_token_s",
    )

    def __init__(self, spec: InstanceSpec, terms: StepTerms) -> None:
        self.terms = terms
        self.changes = 0
        """Grows with every new scale."""
        self.budget = spec.limits.token_budget or DEFAULT_BUDGET
        self.capacity = spec.limits.kv_tokens
        self.error = UNKNOWN_ERROR if spec.error is None else spec.error
        transfer = spec.transfer
        self.transfer_latency_s = 0.0 if transfer is None else transfer.latency_s
        self.transfer_token_s = 0.0 if transfer is None else transfer.seconds_per_token
        self.knotted = bool(terms.sequence_knots)
        """Whether the sequence term is a curve, not a line."""
        self.prefill_scale = self.decode_scale = 1.0
        self.seen = True
        """Whether live traffic has had a say. Until then nothing is held or refused on the profile's word alone."""
        self.rescale(1.0, 1.0)

    def rescale(self, prefill: float, decode: float) -> None:
        """Multiply the profile's prefill terms and its decode terms by what was observed."""
        terms = self.terms
        self.changes += 1
        self.prefill_scale, self.decode_scale = prefill, decode
        self.prefill_s = terms.prefill_s * prefill
        self.attend_s = terms.attend_s * prefill
        self.base_s = terms.base_s * decode
        self.sequence_s = terms.sequence_s * decode
        self.kv_s = terms.kv_s * decode

    def decode_step_s(self, sequences: float, kv_tokens: float) -> float:
        """Seconds of a step that decodes `sequences` holding `kv_tokens`."""
        if self.knotted:
            return self.base_s + self.decode_scale * sequence_seconds(self.terms, sequences) + self.kv_s * kv_tokens
        return self.base_s + self.sequence_s * sequences + self.kv_s * kv_tokens


def cost_of(spec: InstanceSpec) -> Cost | None:
    """The model of an instance; None where neither step terms nor rates are known."""
    if spec.step is not None:
        return Cost(spec, spec.step)
    if spec.rates is None:
        return None
    rates = spec.rates
    return Cost(spec, StepTerms(base_s=1.0 / rates.decode_tokens_per_s, prefill_s=1.0 / rates.prefill_tokens_per_s))
