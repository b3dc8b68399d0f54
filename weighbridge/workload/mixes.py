"""The documents' mixes: chat, document, reasoning, and the mixed bursty workloads made of them.

Lengths are lognormal, given as (mean, sigma of the logarithm); each class is a tier of its own with its latency bounds.
"""

from __future__ import annotations

from weighbridge.workload.arrivals import Arrivals, Bursts, Poisson
from weighbridge.workload.lengths import Lognormal
from weighbridge.workload.synthetic import RequestClass, Synthetic, with_heterogeneity

_PROMPT_RANGE = (8, 8_000)
_OUTPUT_RANGE = (2, 3_000)


def _class(
    kind: str, prompt: tuple[float, float], output: tuple[float, float], ttft_s: float, tpot_s: float
) -> RequestClass:
    return RequestClass(
        kind, 1.0, Lognormal(*prompt, *_PROMPT_RANGE), Lognormal(*output, *_OUTPUT_RANGE), kind, ttft_s, tpot_s
    )


CHAT = _class("chat", (220, 0.7), (140, 0.7), 0.5, 0.040)
DOCUMENT = _class("document", (3_400, 0.25), (110, 0.5), 2.0, 0.060)
REASONING = _class("reasoning", (300, 0.6), (900, 0.5), 1.0, 0.050)

MIXES: dict[str, dict[str, float]] = {
    "chat": {"chat": 1.0},
    "document": {"document": 1.0},
    "reasoning": {"reasoning": 1.0},
    "mixed": {"chat": 0.60, "document": 0.25, "reasoning": 0.15},
    "reasoning-heavy": {"chat": 0.55, "document": 0.10, "reasoning": 0.35},
}
_CLASSES = {c.kind: c for c in (CHAT, DOCUMENT, REASONING)}


def classes(mix: str, heterogeneity: float = 1.0) -> tuple[RequestClass, ...]:
    """The classes of a named mix with their shares; `heterogeneity` scales the spread (see `with_heterogeneity`)."""
    shares = MIXES[mix]
    weighted = tuple(
        RequestClass(c.kind, share, c.prompt, c.output, c.tier, c.ttft_slo_s, c.tpot_slo_s)
        for c, share in ((_CLASSES[kind], share) for kind, share in shares.items())
    )
    return weighted if heterogeneity == 1.0 else with_heterogeneity(weighted, heterogeneity)


def workload(mix: str, arrivals: Arrivals, heterogeneity: float = 1.0) -> Synthetic:
    """A named mix on any arrival process."""
    return Synthetic(arrivals, classes(mix, heterogeneity))


def mixed_bursty(rate: float, mix: str = "mixed", heterogeneity: float = 1.0) -> Synthetic:
    """The stress that separates policies: bursts of three times the quiet rate, 5 s in 20 s on average."""
    return workload(mix, Bursts(rate), heterogeneity)


def steady(rate: float, mix: str = "mixed", heterogeneity: float = 1.0) -> Synthetic:
    """The same mix without bursts."""
    return workload(mix, Poisson(rate), heterogeneity)
