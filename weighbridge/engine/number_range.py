"""Whole numbers within bounds as a GBNF expression over their decimal digits.

A range of numbers with the same count of digits splits at its first digit: the lowest first digit goes with the rest
from the lower bound up, the highest with the rest up to the upper bound, every one between with any rest.
"""

from __future__ import annotations

MAX_DIGITS = 16  # what is open above or below ends there, as everywhere in the JSON grammar


def integer_range(low: int | None, high: int | None) -> str:
    """An expression of the JSON integers from `low` to `high`, both included; None is open.

    Raises ValueError where there is none.
    """
    most = 10**MAX_DIGITS - 1
    low = -most if low is None else low
    high = most if high is None else high
    if low > high:
        raise ValueError("no whole number is within the bounds")
    parts = []
    if low < 0:
        parts.append(f'"-" ({_natural(max(1, -high), -low)})')
    if high >= 0:
        parts.append(_natural(max(0, low), high))
    return " | ".join(parts)


def _natural(low: int, high: int) -> str:
    """From `low` to `high`, both at least 0, by count of digits."""
    parts = []
    while low <= high:
        size = len(str(low))
        end = min(high, 10**size - 1)
        parts.append(_same_size(str(low), str(end)))
        low = end + 1
    return " | ".join(parts)


def _same_size(low: str, high: str) -> str:
    if not low:
        return '""'
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return _any_digits(len(low))
    if low[0] == high[0]:
        return _joined(f'"{low[0]}"', _same_size(low[1:], high[1:])) if rest else f'"{low[0]}"'
    parts = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        parts.append(_joined(f'"{first}"', _same_size(low[1:], "9" * rest)))
        first += 1
    tail = ""
    if high[1:] != "9" * rest:
        tail = _joined(f'"{last}"', _same_size("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        digit = f"[{first}-{last}]" if first < last else f'"{first}"'
        parts.append(f"{digit} {_any_digits(rest)}" if rest else digit)
    if tail:
        parts.append(tail)
    return " | ".join(parts)


def _any_digits(count: int) -> str:
    return "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _joined(first: str, rest: str) -> str:
    return f"{first} ({rest})" if "|" in rest else f"{first} {rest}"
