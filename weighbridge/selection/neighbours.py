"""A bounded set of text sketches: how near a new text is to known ones, and what was learned from feedback there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weighbridge.selection.features import SKETCH_DIMS, FloatArray

NEAREST = 5
CORRECTION_ROWS = 3.0
CORRECTION_MIN_COSINE = 0.5


def familiarity(anchors: FloatArray, sketch: FloatArray, nearest: int = NEAREST) -> float:
    """Mean cosine to the `nearest` closest anchors (anchors x SKETCH_DIMS, unit rows); -1 without anchors."""
    if not len(anchors):
        return -1.0
    return _top_mean(cosines(anchors, sketch), nearest)


def cosines(table: FloatArray, sketch: FloatArray) -> FloatArray:
    """Every row's dot product with `sketch`, on this thread alone.

    A plain matrix product of this size wakes the linear-algebra library's other threads: a little faster on an idle
    machine, milliseconds slower where those cores have work.
    """
    if hasattr(np, "vecdot"):
        out: FloatArray = np.vecdot(table, sketch)
        return out
    slower: FloatArray = np.einsum("ij,j->i", table, sketch)
    return slower


def left_out_familiarity(anchors: FloatArray, nearest: int = NEAREST) -> FloatArray:
    """The familiarity of every anchor among the others; sets the gate's threshold."""
    every = anchors @ anchors.T
    np.fill_diagonal(every, -1.0)
    return np.array([_top_mean(row, nearest) for row in every], np.float32)


def _top_mean(values: FloatArray, nearest: int) -> float:
    """Mean of the largest; reorders `values`."""
    count = min(nearest, values.size)
    values.partition(values.size - count)
    return float(values[-count:].sum()) / count


class Neighbours:
    """Feedback near a text. Holds at most `capacity` records; the oldest makes room.

    A record says by how much one model's outcome differed from what was predicted. A new text's prediction moves by
    the cosine-weighted mean difference of its neighbours, shrunk as if CORRECTION_ROWS neighbours had said zero.
    """

    def __init__(self, models: int, capacity: int = 2048) -> None:
        self.capacity = capacity
        self.count = 0
        self._next = 0
        self._sketches = np.zeros((capacity, SKETCH_DIMS), np.float32)
        self._model = np.zeros(capacity, np.int64)
        self._surprise = np.zeros(capacity, np.float32)
        self._models = models

    def __len__(self) -> int:
        return self.count

    def add(self, sketch: FloatArray, model: int, surprise: float) -> None:
        """`surprise` is outcome minus prediction, in -1..1."""
        if not 0 <= model < self._models:
            raise ValueError(f"model index {model} is outside 0..{self._models - 1}")
        at = self._next
        self._sketches[at], self._model[at], self._surprise[at] = sketch, model, float(np.clip(surprise, -1.0, 1.0))
        self._next = (at + 1) % self.capacity
        self.count = min(self.count + 1, self.capacity)

    def corrections(self, sketch: FloatArray) -> NDArray[np.float64]:
        """What to add to each model's predicted quality; zeros where nothing near was recorded."""
        if not self.count:
            return np.zeros(self._models)
        near = cosines(self._sketches[: self.count], sketch)
        weights = np.maximum(0.0, near - CORRECTION_MIN_COSINE) / (1.0 - CORRECTION_MIN_COSINE)
        model = self._model[: self.count]
        total = np.bincount(model, weights=weights, minlength=self._models)
        moved = np.bincount(model, weights=weights * self._surprise[: self.count], minlength=self._models)
        return moved / (total + CORRECTION_ROWS)
