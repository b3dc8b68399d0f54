"""An optional encoder: a sentence model as ONNX (MiniLM, say) beside the hashed n-grams. Needs the extra `sentences`.

No model comes with this package. The environment variable WEIGHBRIDGE_SENTENCES names a folder with `model.onnx`
(inputs `input_ids`, `attention_mask` and perhaps `token_type_ids`; output one vector per token) and `tokenizer.json`.
A text's vector is the mean over its tokens, of unit length. A checkpoint holds the hash of both files and is refused
with others.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weighbridge.core.errors import CheckpointError
from weighbridge.selection.features import Features, FloatArray, HashedNgrams
from weighbridge.selection.vectors import beside

VARIABLE = "WEIGHBRIDGE_SENTENCES"
PREFIX = "onnx/1:"
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class SentenceVectors:
    """Hashed n-grams and a sentence vector, together of unit length."""

    hashed: HashedNgrams
    session: Any
    tokenizer: Any
    inputs: frozenset[str]
    dims: int
    digest: str

    @property
    def name(self) -> str:
        return f"{PREFIX}{self.digest}+{self.hashed.name}"

    @property
    def buckets(self) -> int:
        return self.hashed.buckets + self.dims

    def encode(self, text: str) -> Features:
        return beside(self.hashed.encode(text), self.vector(text), self.hashed.buckets)

    def vector(self, text: str) -> FloatArray:
        """The mean over the first MAX_TOKENS tokens; zeros for an empty text."""
        ids = self.tokenizer.encode(text.encode("utf-8", "replace").decode("utf-8")).ids
        if not ids:
            return np.zeros(self.dims, np.float32)
        row = np.array([ids], np.int64)
        given = {"input_ids": row, "attention_mask": np.ones_like(row), "token_type_ids": np.zeros_like(row)}
        out = self.session.run(None, {name: given[name] for name in self.inputs})[0]
        mean: FloatArray = out[0].mean(0, dtype=np.float32)
        return mean

    def words(self, text: str) -> list[tuple[str, int]]:
        """Tokens of the hashed part; a sentence vector cannot be attributed to words."""
        return self.hashed.words(text)


def load_sentences(buckets: int) -> SentenceVectors:
    """Read the model that the environment names; it runs on one thread.

    Raises:
        CheckpointError: the variable or the extra is missing, or the files are not such a model.
    """
    where = os.environ.get(VARIABLE, "")
    if not where:
        raise CheckpointError(
            f"sentence vectors need a model: set {VARIABLE} to a folder with model.onnx and tokenizer.json"
        )
    try:
        import onnxruntime
        import tokenizers
    except ImportError:
        raise CheckpointError("sentence vectors need the extra: pip install 'weighbridge[sentences]'") from None
    model, words = Path(where) / "model.onnx", Path(where) / "tokenizer.json"
    try:
        digest = hashlib.sha256(model.read_bytes() + words.read_bytes()).hexdigest()[:12]
        tokenizer = tokenizers.Tokenizer.from_file(str(words))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except OSError as error:
        raise CheckpointError(
            f"{where}: {error.strerror or error}; {VARIABLE} must name a folder with both files"
        ) from None
    except Exception as error:  # both libraries raise types of their own
        raise CheckpointError(f"{where}: not a sentence model and its tokenizer: {error}") from None
    inputs = frozenset(tensor.name for tensor in session.get_inputs())
    shape = session.get_outputs()[0].shape
    if "input_ids" not in inputs or not inputs <= {"input_ids", "attention_mask", "token_type_ids"} or len(shape) != 3:
        raise CheckpointError(f"{model}: takes {sorted(inputs)} and gives {shape}; expected token ids in, vectors out")
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return SentenceVectors(HashedNgrams(buckets), session, tokenizer, inputs, int(shape[2]), digest)
