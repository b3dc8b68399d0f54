"""Counters on their way from a relay to the Router's process, which shows the sum of all. Pure."""

from __future__ import annotations

import msgspec

from weighbridge.gateway.stats import Histogram, Stats


class Change(msgspec.Struct, frozen=True, array_like=True):
    """What was added to one counter (`amount`), or to one histogram (`counts` per bucket, and `amount` to its sum)."""

    family: str
    labels: tuple[str, ...]
    amount: float
    counts: tuple[int, ...] = ()


def take(stats: Stats) -> list[Change]:
    """All that was counted; the counters start again at nothing. Histograms that somebody keeps stay the same ones."""
    changes = []
    for family in stats.families:
        for labels, value in family.values.items():
            if not isinstance(value, Histogram):
                changes.append(Change(family.name, labels, value))
            elif any(value.counts):
                changes.append(Change(family.name, labels, value.sum, tuple(value.counts)))
                value.counts[:] = [0] * len(value.counts)
                value.sum = 0.0
        if family.bounds is None:
            family.values.clear()
    return changes


def add(stats: Stats, changes: list[Change]) -> None:
    """Counts what a relay has counted. Families that are not known here are left out."""
    families = {family.name: family for family in stats.families}
    for change in changes:
        family = families.get(change.family)
        if family is None:
            continue
        if not change.counts:
            family.add(change.labels, change.amount)
            continue
        histogram = family.histogram(change.labels)
        for n, count in enumerate(change.counts[: len(histogram.counts)]):
            histogram.counts[n] += count
        histogram.sum += change.amount
