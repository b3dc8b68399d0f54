"""A recorded decision in the form the pages draw: terms in seconds, error bars, equals.

Policies name their terms in seconds with the suffix `_s`. A `tpot_s` term is seconds per output token and becomes the
decode term, times the expected output tokens. The sum of the terms is the candidate's additional completion time; the
request's own time is that sum without the delay to others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from weighbridge.core.decision import Candidate, Decision
from weighbridge.core.request import Request
from weighbridge.dashboard.snapshot import TERMS, CandidateView, DecisionView

NOT_SECONDS = ("tpot", "hit", "p_slo")


def decided(decision: Decision, request: Request | None, error_of: Callable[[str], float | None]) -> DecisionView:
    """The view of a decision whose outcome is open. `error_of` gives an instance's relative error bar."""
    output = decision.expected_output_tokens
    views = [_candidate(c, output, error_of(c.instance)) for c in decision.candidates]
    best = min((c for c in views if c.total_s is not None), key=lambda c: c.total_s or 0.0, default=None)
    if best is not None:
        views = [replace(c, tie=_equal(c, best)) for c in views]
        if sum(c.tie for c in views) < 2:
            views = [replace(c, tie=False) for c in views]
    chosen = next((c for c in views if c.instance == decision.chosen), None)
    own = first = None
    if chosen is not None and chosen.total_s is not None:
        terms = dict(chosen.terms)
        own = chosen.total_s - terms.get("delay_to_others", 0.0)
        if "wait" in terms and "prefill" in terms:
            first = terms["wait"] + terms["prefill"] + terms.get("transfer", 0.0)
    return DecisionView(
        id=decision.request_id, at_s=decision.at_s, policy=decision.policy, chosen=decision.chosen,
        tier=request.tier if request else "", tenant=request.tenant if request else "",
        model=request.model if request else "", prompt_tokens=request.prompt_tokens if request else 0,
        expected_output_tokens=output, length_estimate=decision.length_estimate.replace("_", " "),
        attempt=decision.attempt, queued_s=decision.queued_s, note=decision.note, candidates=tuple(views),
        forecast_s=own, forecast_ttft_s=first, error_s=chosen.error_s if chosen else None,
    )  # fmt: skip


def settled(view: DecisionView, output_tokens: int, observed_s: float | None) -> DecisionView:
    """A decision whose request ended well: the observed time, and the forecast for the output that really came."""
    at_length = None
    chosen = next((c for c in view.candidates if c.instance == view.chosen), None)
    decode = dict(chosen.terms).get("decode") if chosen is not None else None
    if view.forecast_s is not None and decode is not None and view.expected_output_tokens:
        at_length = view.forecast_s + decode * (output_tokens / view.expected_output_tokens - 1)
    return replace(
        view, outcome="ok", observed_s=observed_s, output_tokens=output_tokens, forecast_at_length_s=at_length
    )


def _candidate(c: Candidate, output_tokens: int, error: float | None) -> CandidateView:
    named = {name.removesuffix("_s"): value for name, value in c.terms.items()}
    terms = {name: value for name, value in named.items() if name not in NOT_SECONDS}
    if "tpot" in named:
        terms["decode"] = named["tpot"] * output_tokens
    order = [t for t in TERMS if t in terms] + [t for t in terms if t not in TERMS]
    total = sum(terms.values()) if terms and not c.excluded else None
    return CandidateView(
        instance=c.instance, terms=tuple((t, terms[t]) for t in order), total_s=total, score=c.score,
        error_s=total * error if total is not None and error else None, cached_tokens=c.cached_tokens,
        prefill_tokens=c.prefill_tokens, decode_tokens=c.decode_tokens, excluded=c.excluded or "",
        p_slo=named.get("hit", named.get("p_slo")),
    )  # fmt: skip


def _equal(c: CandidateView, best: CandidateView) -> bool:
    if c.total_s is None or best.total_s is None:
        return False
    return c.total_s - best.total_s <= max(c.error_s or 0.0, best.error_s or 0.0)


class OutcomeRow(msgspec.Struct, kw_only=True):
    """An outcome as the admin API's `/decisions` gives it; times from the request's arrival."""

    outcome: str
    instance: str = ""
    e2e_s: float | None = None
    ttft_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int = 0


def from_row(row: dict[str, Any], error_of: Callable[[str], float | None]) -> DecisionView:
    """One element of the admin API's `/decisions`. Raises msgspec.ValidationError when it is none."""
    outcome = row.get("outcome")
    view = decided(msgspec.convert({k: v for k, v in row.items() if k != "outcome"}, Decision), None, error_of)
    if outcome is None:
        return view
    end = msgspec.convert(outcome, OutcomeRow)
    known = {"ok": "ok", "cancelled": "cancelled", "rejected": "rejected"}
    queued = view.queued_s
    if end.outcome == "ok" and end.e2e_s is not None:
        view = settled(view, end.output_tokens, end.e2e_s - queued)
    return replace(
        view,
        outcome=known.get(end.outcome, "failed"),
        reason="" if end.outcome in known else end.outcome,
        prompt_tokens=end.prompt_tokens or view.prompt_tokens,
        output_tokens=end.output_tokens,
        ttft_s=None if end.ttft_s is None else end.ttft_s - queued,
    )
