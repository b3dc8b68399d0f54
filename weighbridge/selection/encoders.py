"""Which encoder a checkpoint was trained with, by its name: hashed n-grams, with or without vectors beside them."""

from __future__ import annotations

from typing import Literal

from weighbridge.core.errors import CheckpointError
from weighbridge.selection import sentences, vectors
from weighbridge.selection.features import SKETCH_DIMS, Encoder, HashedNgrams

Kind = Literal["hashed", "vectors", "sentences"]


def make_encoder(kind: Kind, buckets: int) -> Encoder:
    """An encoder with this many hashed buckets. Raises CheckpointError where its extra or model is missing."""
    if kind == "vectors":
        return vectors.load_vectors(buckets)
    return sentences.load_sentences(buckets) if kind == "sentences" else HashedNgrams(buckets)


def encoder_named(name: str, source: str = "checkpoint") -> Encoder:
    """The encoder of a manifest. Raises CheckpointError that names both versions where ours is another."""
    stem, _, digits = name.rpartition(":")
    dense, _, hashed = name.rpartition("+")
    if not digits.isdigit() or HashedNgrams(int(digits)).name != hashed:
        raise CheckpointError(
            f"{source}: was trained with encoder '{name}', this version has '{HashedNgrams().name}'; train it again"
        )
    size = int(digits)
    if size & (size - 1) or not 2 * SKETCH_DIMS <= size <= 1 << 22:
        raise CheckpointError(
            f"{source}: {stem} with {size} buckets is not usable (a power of two from 512 to 4194304)"
        )
    kind: Kind = "hashed"
    if dense:
        kind = "sentences" if dense.startswith(sentences.PREFIX) else "vectors"
    found = make_encoder(kind, size)
    if found.name != name:
        raise CheckpointError(
            f"{source}: was trained with encoder '{name}', here is '{found.name}'; use that one, or train it again"
        )
    return found
