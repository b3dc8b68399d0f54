"""From logits to a token: greedy, or temperature with top-k, top-p and min-p, from a seeded generator per request.

The order is vLLM's: bias and bans, penalties, temperature, then top-k, top-p and min-p. All on the CPU with numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from weighbridge.engine.grammar import Grammar

Logits = NDArray[np.float32]
_NEVER = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    `seed` None draws a fresh one. `logprobs` is how many alternatives to report per token, None for no report.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def plain_greedy(self) -> bool:
        """Whether the token is just the largest logit, so that a whole batch can be done at once."""
        return (
            self.temperature == 0.0
            and not self.logit_bias
            and self.min_tokens == 0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
        )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of a chosen token under the model's own distribution, and the most likely alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Chooses the tokens of one request; holds its random state and the counts that penalties need."""

    __slots__ = ("_ban_until", "_bans", "_bias_ids", "_bias_values", "_counts", "_rng", "grammar", "params", "plain")

    def __init__(
        self, params: SamplingParams, end_tokens: frozenset[int], prompt: list[int], grammar: Grammar | None = None
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.plain = params.plain_greedy and grammar is None
        self._rng = np.random.default_rng(params.seed)
        self._bans = np.fromiter(end_tokens, np.int64, len(end_tokens))
        self._ban_until = params.min_tokens
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._bias_values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        # token -> times generated; prompt tokens count for the repetition penalty only, as 0
        self._counts: Counter[int] = Counter()
        if params.repetition_penalty != 1.0:
            self._counts.update(dict.fromkeys(prompt, 0))

    def sample(self, logits: Logits, generated: int) -> int:
        """The next token; `generated` tokens came before. `logits` (vocabulary long) is read, not changed."""
        row = self._adjusted(logits, generated)
        token = self._draw(row)
        if self.grammar is not None:
            if not self.grammar.allows(token):
                masked = self.grammar.masked(row)
                token = self._draw(masked)
                if masked[token] == _NEVER:
                    raise ValueError("the grammar allows no token that is not banned")
            self.grammar.accept(token)
        if self.params.presence_penalty or self.params.frequency_penalty or self.params.repetition_penalty != 1.0:
            self._counts[token] += 1
        return token

    def _adjusted(self, logits: Logits, generated: int) -> Logits:
        params = self.params
        ban = generated < self._ban_until
        if not (ban or len(self._bias_ids) or self._counts):
            return logits
        row = logits.copy()
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias_values
        if ban:
            row[self._bans] = _NEVER
        if self._counts:
            ids = np.fromiter(self._counts.keys(), np.int64, len(self._counts))
            times = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            values = row[ids]
            if params.repetition_penalty != 1.0:
                factor = np.float32(params.repetition_penalty)
                values = np.where(values > 0, values / factor, values * factor)
            values -= params.frequency_penalty * times + params.presence_penalty * (times > 0)
            row[ids] = values
        return row

    def _draw(self, row: Logits) -> int:
        params = self.params
        if params.temperature <= 1e-5:
            return int(row.argmax())
        ids, weights = _candidates(row, params)
        cumulative = np.cumsum(weights)
        pick = int(np.searchsorted(cumulative, self._rng.random() * cumulative[-1], side="right"))
        return int(ids[min(pick, len(ids) - 1)])


def _candidates(row: Logits, params: SamplingParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Token ids that survive the cuts, most likely first, with weights proportional to their probabilities.

    Without top-k only tokens within 16 temperatures of the best (e^-16 of its weight) are ranked; the rest keeps its
    share of the total, so that top-p cuts where it would over the whole vocabulary.
    """
    best = row.max()
    scaled: Any = (row - best) / np.float32(params.temperature)
    if 0 < params.top_k < len(row):
        ids = np.argpartition(-scaled, params.top_k - 1)[: params.top_k]
        total = None
    elif params.top_p < 1.0 or params.min_p > 0.0:
        ids = np.flatnonzero(scaled > -16.0)
        total = float(np.exp(scaled, dtype=np.float64).sum())
    else:
        return np.arange(len(row)), np.exp(scaled, dtype=np.float64)
    ids = ids[np.argsort(-scaled[ids], kind="stable")]
    weights = np.exp(scaled[ids], dtype=np.float64)
    if params.top_p < 1.0:
        below = np.cumsum(weights) - weights
        limit = params.top_p * (float(weights.sum()) if total is None else total)
        keep = max(1, int(np.searchsorted(below, limit, side="left")))
        ids, weights = ids[:keep], weights[:keep]
    if params.min_p > 0.0:
        keep = max(1, int((weights >= params.min_p * weights[0]).sum()))
        ids, weights = ids[:keep], weights[:keep]
    return ids, weights


def token_logprob(logits: Logits, token: int, alternatives: int) -> TokenLogprob:
    """The model's log probability of a token, and the `alternatives` most likely tokens, from raw logits."""
    best = logits.max()
    norm = float(best) + float(np.log(np.exp(logits - best, dtype=np.float64).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if alternatives > 0:
        ids = np.argpartition(-logits, alternatives - 1)[:alternatives]
        ids = ids[np.argsort(-logits[ids], kind="stable")]
        top = tuple((int(i), float(logits[i]) - norm) for i in ids)
    return TokenLogprob(token, float(logits[token]) - norm, top)
