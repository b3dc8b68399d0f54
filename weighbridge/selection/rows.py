"""Encoded texts as one sparse matrix, with the few products that training needs. numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weighbridge.selection.features import Features, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Rows:
    """Compressed rows: row i holds `values[starts[i]:starts[i + 1]]` at `buckets[...]`; `width` buckets in all."""

    starts: IntArray
    buckets: IntArray
    values: FloatArray
    width: int

    @classmethod
    def of(cls, features: Sequence[Features], width: int) -> Rows:
        lengths = np.array([f.buckets.size for f in features], np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        if not features:
            return cls(starts, np.zeros(0, np.int64), np.zeros(0, np.float32), width)
        buckets = np.concatenate([f.buckets for f in features])
        values = np.concatenate([f.values for f in features])
        return cls(starts, buckets, values, width)

    def __len__(self) -> int:
        return self.starts.size - 1

    def row(self, index: int) -> tuple[IntArray, FloatArray]:
        part = slice(int(self.starts[index]), int(self.starts[index + 1]))
        return self.buckets[part], self.values[part]

    def gram(self, others: Rows) -> NDArray[np.float64]:
        """All dot products of these rows (first axis) with `others` (second axis); every row of `others` non-empty."""
        out = np.empty((len(self), len(others)))
        full = np.zeros(self.width, np.float32)
        lengths = np.diff(others.starts)
        filled = np.flatnonzero(lengths)
        for index in range(len(self)):
            buckets, values = self.row(index)
            full[buckets] = values
            out[index] = 0.0
            if filled.size:
                out[index, filled] = np.add.reduceat(others.values * full[others.buckets], others.starts[filled])
            full[buckets] = 0.0
        return out

    def weighted_sum(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The transpose times `weights` (rows x columns): width x columns."""
        lengths = np.diff(self.starts)
        out = np.empty((self.width, weights.shape[1]))
        for column in range(weights.shape[1]):
            spread = np.repeat(weights[:, column], lengths) * self.values
            out[:, column] = np.bincount(self.buckets, weights=spread, minlength=self.width)
        return out
