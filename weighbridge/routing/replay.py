"""Run a recorded event log through a fresh router: prove parity, or ask another policy what it would have done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from weighbridge.core.actions import Action, Dispatch
from weighbridge.core.errors import LogError
from weighbridge.core.event_log import Entry, Header
from weighbridge.core.events import RequestArrived
from weighbridge.routing.policies.registry import make_policy
from weighbridge.routing.policy import Choice, Policy, View
from weighbridge.routing.router import Router, RouterSettings


class Mismatch(msgspec.Struct, frozen=True):
    """An entry whose recorded and replayed actions differ. `entry` counts from 1, after the header."""

    entry: int
    t: float
    event: str
    recorded: tuple[Action, ...]
    replayed: tuple[Action, ...]


class Parity(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of `check`; the log is proven when `mismatches` is empty."""

    entries: int
    requests: int
    actions: int
    mismatches: tuple[Mismatch, ...]


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """What another policy would have chosen for the requests of a log, given the same recorded world.

    The world is the recorded one: the other policy sees the outcomes of the choices that were really made. It says
    where policies disagree, not how the other one would have fared; for that, simulate.
    """

    policy: str
    requests: int
    agree: int
    recorded_share: dict[str, int]
    alternative_share: dict[str, int]


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """Where another policy would have sent one recorded request: an instance, or "held back".

    `scores` are the other policy's own, lower is better; empty where it gives none.
    """

    policy: str
    request_id: str
    recorded: str
    wished: str
    scores: dict[str, float] = {}
    note: str = ""


def router_from(header: Header, **changes: Any) -> Router:
    """The router that a log was recorded with, some settings changed."""
    try:
        settings = msgspec.convert({**header.router, **changes}, RouterSettings)
    except msgspec.ValidationError as error:
        raise LogError(f"the log's header does not describe a router this program can build: {error}") from None
    return Router(settings)


def check(header: Header, entries: Iterable[Entry], *, most: int = 20) -> Parity:
    """Feed every recorded event at its recorded time and compare the actions; keep at most `most` mismatches."""
    router = router_from(header)
    total = requests = actions = 0
    mismatches: list[Mismatch] = []
    for total, entry in enumerate(entries, start=1):
        replayed = tuple(router.handle(entry.e, entry.t))
        requests += isinstance(entry.e, RequestArrived)
        actions += len(replayed)
        if replayed != entry.a and len(mismatches) < most:
            mismatches.append(Mismatch(total, entry.t, type(entry.e).__name__, entry.a, replayed))
    return Parity(entries=total, requests=requests, actions=actions, mismatches=tuple(mismatches))


def alternative(header: Header, entries: Iterable[Entry], policy: str, options: dict[str, Any]) -> Alternative:
    """Ask `policy`, at every placement of the log, where it would have sent the request.

    A fresh router follows the recorded placements, so that `policy` is asked on the ledger as it really was.
    """
    router = router_from(header, record_decisions=False)
    script = _Script(make_policy(policy, options))
    router.policy = script
    requests = 0
    for entry in entries:
        script.targets = {a.request_id: _first_leg(a) for a in entry.a if isinstance(a, Dispatch)}
        requests += isinstance(entry.e, RequestArrived)
        router.handle(entry.e, entry.t)
    return Alternative(
        policy=policy,
        requests=requests,
        agree=script.agree,
        recorded_share=dict(sorted(script.recorded.items())),
        alternative_share=dict(sorted(script.wished.items())),
    )


def wish(
    header: Header, entries: Iterable[Entry], policy: str, options: dict[str, Any], request_id: str
) -> Wish | None:
    """Ask `policy` about the first placement of one request, on the ledger as it really was; None if it has none."""
    router = router_from(header, record_decisions=False)
    script = _Script(make_policy(policy, options), asked=request_id)
    router.policy = script
    for entry in entries:
        script.targets = {a.request_id: _first_leg(a) for a in entry.a if isinstance(a, Dispatch)}
        router.handle(entry.e, entry.t)
        if script.found is not None:
            return Wish(policy=policy, request_id=request_id, **script.found)
    return None


class ShadowSummary(msgspec.Struct, frozen=True, kw_only=True):
    """How one shadow policy compares over a log. The forecast TTFT sums cover its disagreements that have both."""

    policy: str
    asked: int
    agreed: int
    compared: int
    ttft_s: float
    chosen_ttft_s: float
    failed: int = 0
    """How often it raised, or broke the policy contract, instead of answering."""


def shadow_summary(entries: Iterable[Entry]) -> list[ShadowSummary]:
    """What the shadow policies recorded in a log's decisions would have done, by policy name."""
    sums: dict[str, list[float]] = {}
    for entry in entries:
        for action in entry.a:
            if not isinstance(action, Dispatch) or action.decision is None:
                continue
            for shadow in action.decision.shadows:
                row = sums.setdefault(shadow.policy, [0, 0, 0, 0.0, 0.0, 0])
                row[0] += 1
                if shadow.note:
                    row[5] += 1
                elif shadow.instance == action.decision.chosen:
                    row[1] += 1
                elif shadow.ttft_s is not None and shadow.chosen_ttft_s is not None:
                    row[2] += 1
                    row[3] += shadow.ttft_s
                    row[4] += shadow.chosen_ttft_s
    return [
        ShadowSummary(
            policy=name,
            asked=int(row[0]),
            agreed=int(row[1]),
            compared=int(row[2]),
            ttft_s=row[3],
            chosen_ttft_s=row[4],
            failed=int(row[5]),
        )
        for name, row in sorted(sums.items())
    ]


def _first_leg(action: Dispatch) -> tuple[str, ...]:
    return (action.prefill_instance or "", action.instance) if action.leg == "both" else (action.instance,)


class _Script:
    """A policy that repeats what the log says and notes what another one would have said.

    Where the log has no placement for a request, the recorded policy held it back, and so does this one.
    """

    def __init__(self, other: Policy, asked: str = "") -> None:
        self.other = other
        self.asked = asked
        self.found: dict[str, Any] | None = None
        self.targets: dict[str, tuple[str, ...]] = {}
        self.agree = 0
        self.recorded: dict[str, int] = {}
        self.wished: dict[str, int] = {}

    def choose(self, view: View) -> Choice:
        targets = self.targets.get(view.request.id, ())
        if not targets and view.may_hold:
            return Choice(None)
        target, self.targets[view.request.id] = (targets[0], targets[1:]) if targets else ("", ())
        names = [option.instance.name for option in view.options]
        if target not in names:
            raise LogError(f"request {view.request.id} was sent to {target!r}, which the log says was not up")
        choice = self.other.choose(view)
        wish = "held back" if choice.index is None else names[choice.index]
        if view.request.id == self.asked:
            scores = dict(zip(names, choice.scores, strict=True)) if choice.scores else {}
            self.found = {"recorded": target, "wished": wish, "scores": scores, "note": choice.note}
        self.wished[wish] = self.wished.get(wish, 0) + 1
        self.recorded[target] = self.recorded.get(target, 0) + 1
        self.agree += wish == target
        return Choice(names.index(target))
