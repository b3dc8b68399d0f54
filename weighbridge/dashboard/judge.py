"""What is good, what to watch and what to act on: the only place where a number becomes a judgement.

Pages draw a judgement as a colour, a sign and a word; `weighbridge top` as a word. The sentences under "Needs
attention" name the instance, the fact, and the command that helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weighbridge.dashboard.snapshot import InstanceView, Snapshot
from weighbridge.dashboard.words import percent, seconds, signed

Judgement = Literal["good", "watch", "bad", "none"]
SIGN = {"good": "✓", "watch": "!", "bad": "✕", "none": ""}
WORD = {"good": "good", "watch": "watch", "bad": "act", "none": ""}

ATTAINMENT_TARGET = 0.95
STALE_S = 5.0
LEVEL_TEXT = {
    "profile": "a calibrated profile",
    "online": "only an online estimate",
    "tokens": "no cost model: token counts",
    "requests": "no cost model: request counts",
}


@dataclass(frozen=True, slots=True)
class Attention:
    """One sentence: `subject` links to the instance, `text` follows it, `command` is what to type."""

    judgement: Judgement
    subject: str
    text: str
    command: str = ""


@dataclass(frozen=True, slots=True)
class ErrorSpread:
    """Relative forecast error (observed / forecast - 1) of an instance: 10th, 50th, 90th percentile."""

    low: float
    median: float
    high: float


def above(value: float | None, target: float, slack: float = 0.03) -> Judgement:
    """For a share that should reach `target`; within `slack` below it is to watch."""
    if value is None:
        return "none"
    return "good" if value >= target else "watch" if value >= target - slack else "bad"


def below(value: float | None, limit: float | None, bad: float | None = None) -> Judgement:
    """For a number that should stay under `limit`; over `bad` (default 1.5 times the limit) it is bad."""
    if value is None or limit is None:
        return "none"
    worst = 1.5 * limit if bad is None else bad
    return "good" if value <= limit else "watch" if value <= worst else "bad"


def headroom(load: float | None) -> Judgement:
    """Of an instance: under 3 % left it cannot drain a queue, under 15 % a burst fills it."""
    if load is None:
        return "none"
    return "bad" if load > 0.97 else "watch" if load > 0.85 else "good"


def spread(instance: InstanceView) -> ErrorSpread | None:
    """Error percentiles over the instance's recent requests; None below eight of them."""
    errors = sorted(p.observed_s / p.forecast_s - 1 for p in instance.pairs if p.forecast_s > 0)
    n = len(errors)
    if n < 8:
        return None
    return ErrorSpread(errors[n // 10], errors[n // 2], errors[-1 - n // 10])


def drifted(instance: InstanceView, error: ErrorSpread | None) -> bool:
    """The median error lies outside the instance's own error bar."""
    return error is not None and instance.error_bar is not None and abs(error.median) > instance.error_bar


def worst(snapshot: Snapshot) -> InstanceView | None:
    """The instance in service with the least head-room."""
    known = [i for i in snapshot.instances if i.state == "up" and i.load is not None]
    return max(known, key=lambda i: i.load or 0.0, default=None)


def attention(snapshot: Snapshot) -> list[Attention]:
    """What needs attention, worst first."""
    found = [item for instance in snapshot.instances for item in _of_instance(instance)]
    for tier in snapshot.tiers:
        share = tier.attainment
        if share is not None and share < tier.target and tier.bounds:
            text = f"meets its SLO for {percent(share, 1)} of offered requests, target {percent(tier.target)}."
            found.append(Attention(above(share, tier.target), f"tier:{tier.name}", text))
    order = {"bad": 0, "watch": 1}
    return sorted(found, key=lambda item: order.get(item.judgement, 2))


def _of_instance(i: InstanceView) -> list[Attention]:
    if i.state == "down":
        why = f" ({i.reason})" if i.reason else ""
        return [Attention("bad", i.name, f"is down{why}; nothing is sent to it.", "weighbridge doctor")]
    found: list[Attention] = []
    if i.load is not None and i.load > 1.0:
        text = f"is at {percent(i.load)} of what it can sustain: its queue will not drain by itself."
        found.append(
            Attention(
                "bad", i.name, text, f"weighbridge plan stability --rate {i.rate_per_s:.3g}" if (i.rate_per_s) else ""
            )
        )
    elif i.load is not None and i.load > 0.97:
        found.append(Attention("bad", i.name, f"has {signed(1 - i.load)} head-room left: a burst will queue."))
    if i.kv_peak is not None and i.kv_peak > 1.0:
        text = f"is forecast to need {percent(i.kv_peak)} of its KV cache: it will preempt."
        found.append(Attention("bad", i.name, text))
    error = spread(i)
    if drifted(i, error):
        assert error is not None
        side = "slower" if error.median > 0 else "faster"
        text = (
            f"is {percent(abs(error.median))} {side} than its forecast, outside its error bar of "
            f"{percent(i.error_bar)}: it has drifted."
        )
        found.append(Attention("watch", i.name, text, f"weighbridge calibrate {i.name} --config FILE"))
    elif i.level in ("tokens", "requests"):
        found.append(
            Attention("watch", i.name, f"has {LEVEL_TEXT[i.level]}.", f"weighbridge calibrate {i.name} --config FILE")
        )
    if i.age_s is not None and i.age_s > STALE_S:
        found.append(Attention("watch", i.name, f"last reported {seconds(i.age_s)} ago.", "weighbridge doctor"))
    return found
