"""The policy protocol: one method that chooses one candidate.

A policy sees a `View` and answers with a `Choice`. It keeps what state it likes, draws only from `view.rng`, and
reads time only from `view.now_s`. It must not change anything it is shown.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from weighbridge.core.request import Request
from weighbridge.routing.fleet import Fleet, Instance


class Option:
    """One instance that could take the request, with what this request would mean there."""

    __slots__ = ("cached_tokens", "decode_tokens", "instance", "prefill_tokens")

    def __init__(self, instance: Instance, *, cached_tokens: int, prefill_tokens: int, decode_tokens: int) -> None:
        self.instance = instance
        self.cached_tokens = cached_tokens
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens


class View:
    """All a policy may know. `options` is never empty and keeps the fleet's order; `explain` asks for terms."""

    __slots__ = ("explain", "fleet", "now_s", "options", "request", "rng")

    def __init__(
        self, request: Request, options: Sequence[Option], fleet: Fleet, now_s: float, rng: random.Random, explain: bool
    ) -> None:
        self.request = request
        self.options = options
        self.fleet = fleet
        self.now_s = now_s
        self.rng = rng
        self.explain = explain


class Choice:
    """`index` into `view.options`; one score per option (lower is better, may be empty for a policy that has none),
    and for each option its terms in seconds by name, where the policy can explain itself."""

    __slots__ = ("index", "note", "scores", "terms")

    def __init__(
        self,
        index: int,
        scores: Sequence[float] = (),
        terms: Sequence[Mapping[str, float]] = (),
        note: str = "",
    ) -> None:
        self.index = index
        self.scores = scores
        self.terms = terms
        self.note = note


class Policy(Protocol):
    """Chooses an instance."""

    def choose(self, view: View) -> Choice:
        """Pick one of `view.options`."""
        ...


def least(scores: Sequence[float], rng: random.Random) -> int:
    """Index of the least score. Exact ties are broken by a seeded draw, so that no place in the fleet is favoured."""
    best = min(scores)
    first = scores.index(best)
    if scores.count(best) == 1:
        return first
    return rng.choice([index for index, score in enumerate(scores) if score == best])
