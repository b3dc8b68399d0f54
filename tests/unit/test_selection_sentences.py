"""The optional sentence encoder, with a stand-in for the ONNX runtime: a checkpoint is tied to the model's files."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.test_selection_checkpoint import POOL, dataset
from weighbridge.core.errors import CheckpointError
from weighbridge.selection import checkpoint, sentences
from weighbridge.selection.selector import Selector
from weighbridge.selection.train import TrainSettings, train

DIMS = 6


class Session:
    """Six numbers per token, from its id alone."""

    def __init__(self, path: str, options: Any, providers: list[str]) -> None:
        assert options.intra_op_num_threads == 1
        if b"broken" in Path(path).read_bytes():
            raise RuntimeError("INVALID_PROTOBUF")
        self.flat = b"flat" in Path(path).read_bytes()

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name="input_ids"), SimpleNamespace(name="attention_mask")]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(shape=["batch", DIMS] if self.flat else ["batch", "sequence", DIMS])]

    def run(self, names: None, given: dict[str, Any]) -> list[Any]:
        assert set(given) == {"input_ids", "attention_mask"}
        ids = given["input_ids"]
        assert given["attention_mask"].shape == ids.shape
        return [np.cos(ids[..., None] * np.arange(1, DIMS + 1, dtype=np.float32))]


class Tokenizer:
    @classmethod
    def from_file(cls, path: str) -> Tokenizer:
        Path(path).read_bytes()
        return cls()

    def no_padding(self) -> None: ...

    def enable_truncation(self, tokens: int) -> None:
        self.most = tokens

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=[len(word) for word in text.split()][: self.most])


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"one")
    (folder / "tokenizer.json").write_bytes(b"{}")
    runtime = SimpleNamespace(SessionOptions=SimpleNamespace, InferenceSession=Session)
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Tokenizer))
    monkeypatch.setenv(sentences.VARIABLE, str(folder))
    return folder


def test_a_sentence_vector_stands_beside_the_words(model: Path) -> None:
    encoder = sentences.load_sentences(1024)
    features = encoder.encode("one three fifteen")
    assert encoder.buckets == 1024 + DIMS
    assert list(features.buckets[-DIMS:]) == list(range(1024, 1024 + DIMS))
    assert float(features.values @ features.values) == pytest.approx(1.0, abs=1e-5)
    dense = features.values[-DIMS:]
    assert float(dense @ dense) == pytest.approx(0.5, abs=1e-5)
    assert encoder.vector("word " * 1000) == pytest.approx(encoder.vector("word"), abs=1e-5)
    assert encoder.encode("").tokens == 0


def test_a_checkpoint_is_refused_with_another_model(model: Path, tmp_path: Path) -> None:
    made = train(dataset(), TrainSettings(buckets=1024, encoder="sentences"), pool="two", created="")
    checkpoint.save(made, tmp_path / "ck")
    selector = Selector(checkpoint.load(tmp_path / "ck"), POOL)
    assert selector.decide([{"role": "user", "content": "write a cheerful poem number 5 please 7"}]).model == "small"
    (model / "model.onnx").write_bytes(b"two")
    with pytest.raises(CheckpointError, match="use that one, or train it again"):
        checkpoint.load(tmp_path / "ck")


def test_what_is_missing_or_wrong_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, words in ((b"broken", "INVALID_PROTOBUF"), (b"flat", "expected token ids in")):
        (model / "model.onnx").write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            sentences.load_sentences(1024)
    (model / "model.onnx").unlink()
    with pytest.raises(CheckpointError, match="must name a folder with both files"):
        sentences.load_sentences(1024)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(CheckpointError, match=r"weighbridge\[sentences\]"):
        sentences.load_sentences(1024)
    monkeypatch.delenv(sentences.VARIABLE)
    with pytest.raises(CheckpointError, match=sentences.VARIABLE):
        sentences.load_sentences(1024)
