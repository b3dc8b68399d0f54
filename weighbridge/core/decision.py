"""Why a request went where it went."""

from __future__ import annotations

import msgspec


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One instance as it looked to the policy. Tokens are tokens, `terms` are seconds by name, lower `score` wins.

    `excluded` holds the reason when the instance could not be chosen; it then has no score.
    """

    instance: str
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    terms: dict[str, float] = {}
    score: float | None = None
    excluded: str | None = None


class ShadowChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a shadow policy would have chosen, with the TTFT forecast there and on the instance really chosen.

    Where it failed, `instance` is empty and `note` says how.
    """

    policy: str
    instance: str
    ttft_s: float | None = None
    chosen_ttft_s: float | None = None
    note: str = ""


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The record of one placement. `length_estimate` names the output-length estimate that was used."""

    request_id: str
    at_s: float
    policy: str
    chosen: str
    candidates: tuple[Candidate, ...]
    attempt: int = 1
    queued_s: float = 0.0
    length_estimate: str = "full_budget"
    expected_output_tokens: int = 0
    note: str = ""
    shadows: tuple[ShadowChoice, ...] = ()
