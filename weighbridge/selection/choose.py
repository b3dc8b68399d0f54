"""The last step of a decision, per mode: from weighed candidates to one name and the reason in words."""

from __future__ import annotations

from collections.abc import Mapping

from weighbridge.core.errors import RequestError
from weighbridge.selection.decision import Mode, Weighed

Choice = tuple[str, str]


def fixed(candidates: tuple[Weighed, ...], model: str) -> Choice:
    """The named model, or a RequestError when it is unknown or cannot serve the request."""
    found = next((c for c in candidates if c.model == model), None)
    if found is None:
        names = ", ".join(c.model for c in candidates)
        raise RequestError(f"mode fixed needs a model of the pool ({names}), got '{model}'", param="model")
    if found.excluded is not None:
        raise RequestError(f"model '{model}' cannot serve this request: {found.excluded}", param="model")
    return model, "fixed by the request"


def best(allowed: Mapping[str, Weighed], mode: Mode, previous: str, margin_usd: float) -> Choice:
    """Highest utility; a session's previous model keeps it unless it is beaten by more than the margin."""
    top = max(allowed.values(), key=lambda c: (_utility(c), -c.cost_usd))
    words = f"{mode.value}: highest utility ${_utility(top):.5f} (chance {top.quality:.2f}, ${top.cost_usd:.6f})"
    before = allowed.get(previous)
    if before is None or before is top:
        return top.model, words
    gain = _utility(top) - _utility(before)
    if gain <= margin_usd:
        return before.model, f"session stays: {top.model} is better by ${gain:.5f}, within ${margin_usd:g}"
    return top.model, f"{words}; leaves {previous}, ${gain:.5f} behind"


def min_quality(allowed: Mapping[str, Weighed], bound: float, second_usd: float) -> Choice:
    """Least cost, waiting included, among those with at least this chance; else the best chance."""
    enough = [c for c in allowed.values() if c.quality >= bound]
    if not enough:
        top = max(allowed.values(), key=lambda c: (c.quality, -c.cost_usd))
        return top.model, f"no model reaches chance {bound:g}; best is {top.quality:.2f}"
    low = min(enough, key=lambda c: c.cost_usd + second_usd * (c.latency_s or 0.0))
    return low.model, f"cheapest with chance >= {bound:g} ({low.quality:.2f}, ${low.cost_usd:.6f})"


def strong_share(allowed: Mapping[str, Weighed], strong: str, weak: str, share: float, threshold: float) -> Choice:
    """The strong model where its gain over the weak one is among the top `share` of held-out gains."""
    if strong not in allowed or weak not in allowed:
        for name in (strong, weak):
            if name in allowed:
                return name, f"the other of {strong} and {weak} cannot serve this request"
        return best(allowed, Mode.BALANCED, "", 0.0)
    gain = allowed[strong].quality - allowed[weak].quality
    takes = share >= 1.0 or (share > 0.0 and gain > threshold)
    sign = ">" if takes else "<="
    return (strong if takes else weak), f"gain of {strong} {gain:+.3f} {sign} {threshold:+.3f} (share {share:g})"


def unknown(allowed: Mapping[str, Weighed], fallback: str) -> Choice:
    """The fallback for a text of no known family, or the best mean over families when it cannot serve."""
    if fallback in allowed:
        return fallback, "unknown task family: fallback"
    top = max(allowed.values(), key=lambda c: (c.quality, -c.cost_usd))
    return top.model, f"unknown task family: fallback {fallback} cannot serve, best over all families instead"


def _utility(candidate: Weighed) -> float:
    return float("-inf") if candidate.utility_usd is None else candidate.utility_usd
