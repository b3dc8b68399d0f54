"""The optional encoder: WordLlama's static token vectors beside the hashed n-grams. Needs the extra `vectors`.

A text's mean token vector takes 256 further buckets, so heads, training and checkpoints are the same as without it.
The vectors come with the `wordllama` package (16 MB, nothing is fetched); that package's own code is not run.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from weighbridge.core.errors import CheckpointError
from weighbridge.selection import tensors
from weighbridge.selection.features import Features, FloatArray, HashedNgrams

PREFIX = "wordllama-256/1+"
DIMS = 256
SHARE = 0.5
"""How much of the squared length of the features the vector part takes."""
_WEIGHTS, _TOKENIZER = "weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class WordVectors:
    """Hashed n-grams and a mean token vector, together of unit length."""

    hashed: HashedNgrams
    table: FloatArray
    tokenizer: Any

    @property
    def name(self) -> str:
        return PREFIX + self.hashed.name

    @property
    def buckets(self) -> int:
        return self.hashed.buckets + DIMS

    def encode(self, text: str) -> Features:
        ids = self.tokenizer.encode(text.encode("utf-8", "replace").decode("utf-8"), add_special_tokens=False).ids
        vector = self.table[ids].sum(0) if ids else np.zeros(DIMS, np.float32)
        return beside(self.hashed.encode(text), vector, self.hashed.buckets)

    def words(self, text: str) -> list[tuple[str, int]]:
        """Tokens of the hashed part; vectors cannot be attributed to words that were averaged."""
        return self.hashed.words(text)


def beside(plain: Features, vector: FloatArray, first: int) -> Features:
    """Features with a dense vector from bucket `first` on, together of unit length; a zero vector adds nothing."""
    length = float(np.sqrt(vector @ vector))
    if not plain.tokens or length == 0.0:
        return plain
    buckets = np.concatenate([plain.buckets, first + np.arange(len(vector))])
    values = np.concatenate([plain.values * (1.0 - SHARE) ** 0.5, vector * (SHARE**0.5 / length)])
    return Features(buckets, values.astype(np.float32), plain.tokens)


def load_vectors(buckets: int) -> WordVectors:
    """Read the vectors from the installed package.

    Raises:
        CheckpointError: the extra is not installed, or holds other files than expected.
    """
    spec = find_spec("wordllama")
    try:
        import tokenizers
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        raise CheckpointError("word vectors need the extra: pip install 'weighbridge[vectors]'")
    folder = Path(spec.origin).parent
    try:
        table = tensors.unpack((folder / _WEIGHTS).read_bytes())["embedding.weight"]
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / _TOKENIZER))
    except (OSError, KeyError, tensors.TensorError) as error:
        raise CheckpointError(f"{folder}: not the word vectors of wordllama 0.4: {error}") from None
    if table.shape[1:] != (DIMS,):
        raise CheckpointError(f"{folder / _WEIGHTS}: has vectors of shape {table.shape}, expected {DIMS} columns")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return WordVectors(HashedNgrams(buckets), table.astype(np.float32), tokenizer)
