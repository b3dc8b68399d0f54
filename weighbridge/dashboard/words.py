"""Numbers as people read them: unit beside the number, a real minus sign, and a dash where nothing is known."""

from __future__ import annotations

import math

NONE = "–"


def percent(value: float | None, digits: int = 0) -> str:
    """A share: 0.979 is `97.9 %`."""
    if value is None or math.isnan(value):
        return NONE
    return f"{100 * value:.{digits}f} %".replace("-", "−")


def signed(value: float | None, digits: int = 0) -> str:
    """A relative difference with its sign; what rounds to zero has none."""
    if value is None or math.isnan(value):
        return NONE
    text = f"{100 * value:+.{digits}f}"
    if float(text) == 0:
        text = text[1:]
    return f"{text} %".replace("-", "−")


def seconds(value: float | None) -> str:
    """Three figures or so: `371 ms`, `1.53 s`, `12.4 s`, `3 min 20 s`."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "never"
    size = abs(value)
    if size < 0.00005:
        return "0 s"
    if size < 0.01:
        text = f"{1000 * value:.1f} ms"
    elif size < 0.9995:
        text = f"{1000 * value:.0f} ms"
    elif size < 9.995:
        text = f"{value:.2f} s"
    elif size < 120:
        text = f"{value:.1f} s"
    elif size < 7200:
        text = f"{value // 60:.0f} min {value % 60:.0f} s"
    else:
        text = f"{value // 3600:.0f} h {value % 3600 // 60:.0f} min"
    return text.replace("-", "−")


def count(value: float | None) -> str:
    """A whole number with thousands separated."""
    if value is None or math.isnan(value):
        return NONE
    return f"{value:,.0f}".replace("-", "−")


def rate(value: float | None, unit: str = "/s") -> str:
    """`46.3/s`; more figures for small rates."""
    if value is None or math.isnan(value):
        return NONE
    digits = 1 if value >= 10 else 2
    return f"{value:,.{digits}f}{unit}"


def plural(number: int, word: str) -> str:
    """`1 instance`, `2 instances`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def age(value: float | None) -> str:
    """Time since, in tenths of a second: `0.5 s`."""
    if value is None or math.isnan(value):
        return NONE
    return f"{value:.1f} s" if value < 120 else seconds(value)
