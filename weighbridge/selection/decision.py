"""What the selector is asked, what it knows of the moment, and what it answers."""

from __future__ import annotations

import enum

import msgspec


class Mode(enum.StrEnum):
    """How candidates are compared; `docs/selection.md` gives the rule of each."""

    QUALITY = "quality"
    BALANCED = "balanced"
    CHEAP = "cheap"
    FIXED = "fixed"
    MAX_COST_USD = "max_cost_usd"
    MIN_QUALITY = "min_quality"
    STRONG_SHARE = "strong_share"


class LiveCost(msgspec.Struct, frozen=True, kw_only=True):
    """One model's pool right now, as the router forecasts it for this request. Seconds, queueing included.

    `ttft_s` None: nothing is known of its speed. `healthy` counts instances that can take work; none excludes it.
    """

    ttft_s: float | None = None
    tpot_s: float = 0.0
    healthy: int = 1

    def latency_s(self, output_tokens: float) -> float | None:
        """Seconds to the last of this many tokens; None where the speed is unknown."""
        return None if self.ttft_s is None else self.ttft_s + self.tpot_s * max(0.0, output_tokens - 1.0)


class Constraints(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of one request. `previous` is the model that served this session last; empty strings mean unset.

    `strong_share` is the share of traffic, 0..1, that may go to the strong model in the mode of that name.
    """

    model: str = ""
    max_cost_usd: float | None = None
    min_quality: float | None = None
    strong_share: float | None = None
    max_latency_s: float | None = None
    max_output_tokens: int | None = None
    region: str = ""
    json_schema: bool = False
    exclude: tuple[str, ...] = ()
    previous: str = ""
    headers: dict[str, str] = {}


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Which artefacts a decision came from: numbers of different checkpoints never share a line."""

    checkpoint: str
    encoder: str
    text: str
    pool: str
    pool_hash: str
    trained_on: tuple[str, ...]


class Weighed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One candidate. `quality` is a chance 0..1, `utility_usd` what is maximised; `excluded` is the reason, if any.

    `untaught` is the chance before feedback on similar texts moved it; equal to `quality` without any.
    """

    model: str
    quality: float
    untaught: float
    cost_usd: float
    input_tokens: int
    output_tokens: int
    latency_s: float | None = None
    utility_usd: float | None = None
    excluded: str | None = None


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The chosen model and why. `known` is false when the text resembled no family seen in training.

    `familiarity` is compared with `threshold` (both cosines); `rules` names the operator's rules that matched.
    """

    model: str
    mode: Mode
    reason: str
    candidates: tuple[Weighed, ...]
    known: bool
    familiarity: float
    threshold: float
    expected_output_tokens: int
    prompt_tokens: int
    truncated: bool
    provenance: Provenance
    rules: tuple[str, ...] = ()

    def chosen(self) -> Weighed:
        """The candidate that was taken."""
        return next(c for c in self.candidates if c.model == self.model)
