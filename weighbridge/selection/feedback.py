"""What clients said about answers, as an append-only log: one JSON object per line, sketches instead of texts.

A sketch is a projection of hashed words: it says which texts are alike, the text cannot be read back from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

import msgspec
import numpy as np

from weighbridge.core.errors import InputError
from weighbridge.selection.features import SKETCH_DIMS, FloatArray
from weighbridge.selection.selector import Selector

VERSION = 1
MAX_LINE_BYTES = 64 << 10


class Feedback(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One judged answer. `score` is 0 (useless) to 1 (good); `forecast` is the chance predicted without feedback."""

    v: int = VERSION
    at_s: float
    model: str
    score: float
    forecast: float
    checkpoint: str
    sketch: bytes
    request_id: str = ""


def make_feedback(
    selector: Selector,
    sketch: FloatArray,
    model: str,
    score: float,
    forecast: float,
    at_s: float,
    request_id: str = "",
) -> Feedback:
    """A record ready to be appended.

    Raises:
        InputError: a score outside 0..1 or a model that the pool does not have.
    """
    if not 0.0 <= score <= 1.0:
        raise InputError(f"score: must lie between 0 and 1, is {score:g}")
    if model not in selector.pool.names:
        raise InputError(f"model: '{model}' is not in the pool ({', '.join(selector.pool.names)})")
    return Feedback(
        at_s=at_s,
        model=model,
        score=score,
        forecast=forecast,
        checkpoint=selector.provenance.checkpoint,
        sketch=sketch.astype("<f2").tobytes(),
        request_id=request_id,
    )


def encode(record: Feedback) -> bytes:
    """One line with its line break."""
    return msgspec.json.encode(record) + b"\n"


def read(stream: BinaryIO, name: str = "feedback") -> Iterable[Feedback]:
    """Every whole record; a line cut short at the end (a crash while appending) is passed over.

    Raises:
        InputError: a bad line elsewhere, named by its number.
    """
    number = 0
    while line := stream.readline(MAX_LINE_BYTES):
        number += 1
        try:
            record = msgspec.json.decode(line, type=Feedback)
        except msgspec.DecodeError as error:
            if not line.endswith(b"\n") and not stream.read(1):
                return
            raise InputError(f"{name}: line {number}: {error}") from None
        if record.v != VERSION or len(record.sketch) != 2 * SKETCH_DIMS:
            raise InputError(f"{name}: line {number}: is of version {record.v}, this one reads {VERSION}")
        yield record


def replay(selector: Selector, records: Iterable[Feedback]) -> int:
    """Teach the selector; records about models that the pool no longer has are passed over. Returns how many taught."""
    taught = 0
    for record in records:
        if record.model in selector.pool.names:
            sketch = np.frombuffer(record.sketch, "<f2").astype(np.float32)
            selector.learn(sketch, record.model, record.score - record.forecast)
            taught += 1
    return taught
