"""The optional word vectors: features, a round trip through a checkpoint, and the refusal without the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.test_selection_checkpoint import POOL, dataset
from weighbridge.core.errors import CheckpointError
from weighbridge.selection import checkpoint, vectors
from weighbridge.selection.features import HashedNgrams
from weighbridge.selection.selector import Selector
from weighbridge.selection.train import TrainSettings, train


def test_without_the_package_the_refusal_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"weighbridge\[vectors\]"):
        vectors.load_vectors(1024)


def test_vectors_bring_synonyms_nearer_and_survive_a_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("wordllama")
    encoder, hashed = vectors.load_vectors(1024), HashedNgrams(1024)
    assert encoder.buckets == 1024 + 256

    def cosine(kind: vectors.WordVectors | HashedNgrams, one: str, two: str) -> float:
        full = np.zeros(kind.buckets)
        first, second = kind.encode(one), kind.encode(two)
        full[first.buckets] = first.values
        return float(full[second.buckets] @ second.values)

    pair = ("a cheerful poem about the sea", "happy verses on an ocean")
    assert cosine(encoder, *pair) > cosine(hashed, *pair) + 0.1
    assert encoder.encode("").tokens == 0
    features = encoder.encode("数学 and \ud800 more")
    assert float(features.values @ features.values) == pytest.approx(1.0, abs=1e-4)
    made = train(dataset(), TrainSettings(buckets=1024, encoder="vectors"), pool="two", created="")
    checkpoint.save(made, tmp_path)
    selector = Selector(checkpoint.load(tmp_path), POOL)
    assert selector.encoder.name == "wordllama-256/1+hashed-ngrams/1:1024"
    assert selector.decide([{"role": "user", "content": "write a cheerful poem number 5 please 7"}]).model == "small"
