"""Which words moved a decision: how much each speaks for the chosen model over the runner-up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weighbridge.selection.decision import Decision
from weighbridge.selection.selector import Selector
from weighbridge.selection.text import routing_text


class WordWeight(msgspec.Struct, frozen=True, kw_only=True):
    """`score` is the word's share of the difference of raw quality scores, chosen minus runner-up."""

    word: str
    score: float


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`runner_up` has the next best utility; words are those with the largest effect either way.

    Word pairs and letter windows also count in the decision; only single words are listed, as they can be read.
    """

    decision: Decision
    runner_up: str = ""
    words: tuple[WordWeight, ...] = ()
    routing_text: str = ""


def explain(
    selector: Selector, decision: Decision, messages: Sequence[object], tools: Sequence[object] = (), most: int = 8
) -> Explanation:
    """Explain a decision that this selector made for these messages."""
    text = routing_text(messages, tools, selector.settings.text).text
    rivals = [c for c in decision.candidates if c.excluded is None and c.model != decision.model]
    if not rivals or not decision.known:
        return Explanation(decision=decision, routing_text=text)
    rival = max(rivals, key=lambda c: c.utility_usd or float("-inf")).model
    weights = selector.weights_of(decision.model) - selector.weights_of(rival)
    features = selector.encoder.encode(text)
    value = dict(zip(features.buckets.tolist(), features.values.tolist(), strict=True))
    scores = {word: float(weights[bucket]) * value[bucket] for word, bucket in selector.encoder.words(text)}
    ranked = sorted(scores, key=lambda word: -abs(scores[word]))[:most]
    words = tuple(WordWeight(word=word, score=round(scores[word], 5)) for word in ranked)
    return Explanation(decision=decision, runner_up=rival, words=words, routing_text=text)
