"""Sampling against the textbook over the whole vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from weighbridge.engine.sampling import Sampler, SamplingParams, _candidates, token_logprob

RNG = np.random.default_rng(5)
LOGITS = RNG.normal(0, 3, 1000).astype(np.float32)


def textbook(params: SamplingParams) -> np.ndarray:
    """Probabilities after every cut, by sorting everything."""
    p = np.exp(LOGITS.astype(np.float64) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.ones(len(p), bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
        p = np.where(keep, p, 0) / p[keep].sum()
    if params.top_p < 1:
        below = np.cumsum(p[order]) - p[order]
        keep[order[1:][below[1:] >= params.top_p]] = False
        p = np.where(keep, p, 0) / p[keep].sum()
    if params.min_p:
        keep &= p >= params.min_p * p.max()
        p = np.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=40),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.5),
        SamplingParams(top_k=20, top_p=0.8, min_p=0.05),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=1),
    ],
)
def test_candidates_have_the_textbooks_probabilities(params: SamplingParams) -> None:
    ids, weights = _candidates(LOGITS, params)
    got = np.zeros(len(LOGITS))
    got[ids] = weights / weights.sum()
    np.testing.assert_allclose(got, textbook(params), atol=1e-6)


def test_draws_follow_the_distribution_and_the_seed() -> None:
    params = SamplingParams(temperature=0.8, top_k=5, seed=1)
    first, second = (Sampler(params, frozenset(), []) for _ in range(2))
    draws = [first.sample(LOGITS, 0) for _ in range(4000)]
    assert draws == [second.sample(LOGITS, 0) for _ in range(4000)]
    share = np.bincount(draws, minlength=1000) / 4000
    np.testing.assert_allclose(share, textbook(params), atol=0.03)


def test_bias_bans_and_penalties() -> None:
    best = int(LOGITS.argmax())
    assert Sampler(SamplingParams(temperature=0, logit_bias={7: 100}), frozenset(), []).sample(LOGITS, 0) == 7
    banned = Sampler(SamplingParams(temperature=0, min_tokens=2), frozenset([best]), [])
    assert [banned.sample(LOGITS, n) == best for n in range(3)] == [False, False, True]
    once = Sampler(SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0), frozenset(), [])
    close = LOGITS.copy()
    close[3] = close[best] - 0.1
    assert [once.sample(close, n) for n in range(2)] == [best, 3]
    repeated = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), frozenset(), [best])
    assert repeated.sample(close, 0) == 3
    assert LOGITS[best] == close[best], "the logits themselves are not changed"


def test_logprobs_are_normalised_and_sorted() -> None:
    entry = token_logprob(LOGITS, 3, 4)
    exact = LOGITS.astype(np.float64) - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert entry.logprob == pytest.approx(exact[3], abs=1e-5)
    assert [token for token, _ in entry.top] == list(np.argsort(-LOGITS)[:4])
