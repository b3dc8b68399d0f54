"""The policy protocol: one method that chooses one candidate, or asks to wait.

A policy sees a `View` and answers with a `Choice`. It keeps what state it likes, draws only from `view.rng`, and
reads time only from `view.now_s`. It must not change anything it is shown, nor keep options after it has answered:
the router uses them again.

Class attributes say what it wishes of the router; all may be left out:
    holds = True                        its requests wait in the router's queue until an instance has room
    shortlist = True                    of more than 32 instances it is shown the 16 with the shortest queue and step
    length_estimate = "full_budget"     which estimate of output length it is shown (see RouterSettings)
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from operator import index
from typing import Protocol

from weighbridge.core.actions import Leg
from weighbridge.core.request import DEFAULT_TIERS, Request, Tier
from weighbridge.routing.fleet import Fleet, Instance

_STANDARD = DEFAULT_TIERS[1]


class Option:
    """One instance that could take the request, with what this request would mean there.

    `prefill_tokens` is the uncached part of the prompt (0 on the decode leg), `decode_tokens` the expected output
    (0 on the prefill leg).
    """

    __slots__ = ("cached_tokens", "decode_tokens", "instance", "prefill_tokens")

    def __init__(self, instance: Instance, *, cached_tokens: int, prefill_tokens: int, decode_tokens: int) -> None:
        self.instance = instance
        self.cached_tokens = cached_tokens
        self.prefill_tokens = prefill_tokens
        self.decode_tokens = decode_tokens


class View:
    """All a policy may know. `options` is never empty and keeps the fleet's order; `explain` asks for terms.

    `may_hold`: the answer may be `Choice(None)`, "not now"; the request is offered again when something changes.
    `deadline_s` is when its first token is due, infinity where its tier has no such bound.
    `full` are further instances that could take it but have no room now, shown where speeds differ; `held` requests of
    its tier and more urgent ones wait here, this one included. `released`: it has waited so long that only a better
    instance is worth waiting for. `no_room_s`: for so long, since it came, nobody could be sent for want of room.
    """

    __slots__ = (
        "deadline_s",
        "explain",
        "fleet",
        "full",
        "held",
        "leg",
        "may_hold",
        "no_room_s",
        "now_s",
        "options",
        "released",
        "request",
        "rng",
        "tier",
    )

    def __init__(
        self,
        request: Request,
        options: Sequence[Option],
        fleet: Fleet,
        now_s: float,
        rng: random.Random,
        explain: bool,
        *,
        leg: Leg = "whole",
        tier: Tier = _STANDARD,
        deadline_s: float = float("inf"),
        may_hold: bool = False,
        full: Sequence[Option] = (),
        held: int = 1,
        released: bool = False,
        no_room_s: float = 0.0,
    ) -> None:
        self.full = full
        self.held = held
        self.released = released
        self.no_room_s = no_room_s
        self.request = request
        self.options = options
        self.fleet = fleet
        self.now_s = now_s
        self.rng = rng
        self.explain = explain
        self.leg = leg
        self.tier = tier
        self.deadline_s = deadline_s
        self.may_hold = may_hold


class Choice:
    """`index` into `view.options`, or None to wait (only where `view.may_hold`); one score per option (lower is
    better, may be empty for a policy that has none), and for each option its terms in seconds by name, where the
    policy can explain itself. `tight` with no index: it would miss its first-token bound wherever it went now, so
    nobody behind it need wait for it. `lasting`: all its numbers are finite floats, and the terms dictionaries made for
    this choice alone, so that the record may keep them as they are."""

    __slots__ = ("index", "lasting", "note", "scores", "terms", "tight")

    def __init__(
        self,
        index: int | None,
        scores: Sequence[float] = (),
        terms: Sequence[Mapping[str, float]] = (),
        note: str = "",
        tight: bool = False,
        lasting: bool = False,
    ) -> None:
        self.index = index
        self.lasting = lasting
        self.tight = tight
        self.scores = scores
        self.terms = terms
        self.note = note


class Policy(Protocol):
    """Chooses an instance."""

    def choose(self, view: View) -> Choice:
        """Pick one of `view.options`."""
        ...


def breach(choice: object, options: Sequence[Option], *, may_hold: bool) -> str:
    """How a choice breaks the policy contract; empty if it does not."""
    if not isinstance(choice, Choice):
        return f"it answers {type(choice).__name__} instead of Choice"
    if choice.index is None:
        return "" if may_hold else "it wants to hold where it must choose"
    if not 0 <= index(choice.index) < len(options):
        return f"index {choice.index} of {len(options)} options"
    return ""


def least(scores: Sequence[float], rng: random.Random) -> int:
    """Index of the least score. Exact ties are broken by a seeded draw, so that no place in the fleet is favoured."""
    best = min(scores)
    first = scores.index(best)
    if scores.count(best) == 1:
        return first
    ties = [index for index, score in enumerate(scores) if score == best]
    return ties[_below(len(ties), rng)]


def _below(count: int, rng: random.Random) -> int:
    """The number that `rng.choice` would draw, with fewer calls between."""
    bits = count.bit_length()
    number = rng.getrandbits(bits)
    while number >= count:
        number = rng.getrandbits(bits)
    return number
