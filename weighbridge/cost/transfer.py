"""Seconds to move bytes of KV between two instances: latency + bytes / bandwidth, fitted to measured transfers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from weighbridge.core.errors import InputError
from weighbridge.core.instance import Transfer
from weighbridge.cost.nnls import nnls


class TransferTerms(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of one pair. `error` is the median absolute relative residual of the transfers fitted.

    `bytes_per_token` is the KV of one token as it was moved; 0 where that is not known.
    """

    latency_s: float
    seconds_per_byte: float
    error: float = 0.0
    count: int = 0
    bytes_per_token: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Infinite where no transfer was large enough to see a bandwidth."""
        return 1.0 / self.seconds_per_byte if self.seconds_per_byte > 0 else float("inf")

    @property
    def per_token(self) -> Transfer:
        """As the router uses it. Raises InputError where the KV of a token is not known."""
        if not self.bytes_per_token > 0:
            raise InputError("the transfer terms do not say `bytes_per_token`; measure the transfer again")
        return Transfer(latency_s=self.latency_s, seconds_per_token=self.seconds_per_byte * self.bytes_per_token)

    def seconds(self, size_bytes: float) -> float:
        """Of one transfer on an idle link."""
        return self.latency_s + self.seconds_per_byte * size_bytes


def fit_transfer(samples: Sequence[tuple[int, float]], *, warm_up: int = 1) -> TransferTerms:
    """Fit (bytes, seconds) samples in the order measured; the first `warm_up` opened connections and are left out.

    Raises:
        InputError: fewer than three warm samples, only one size, or seconds that are not positive.
    """
    warm = list(samples[warm_up:])
    sizes = {size for size, _ in warm}
    if len(warm) < 3 or len(sizes) < 2:
        raise InputError(
            f"{len(warm)} transfers of {len(sizes)} sizes cannot tell latency from bandwidth; measure three"
        )
    if any(not seconds > 0 for _, seconds in warm):
        raise InputError("a transfer took no time: its clock is too coarse")
    size = np.asarray([float(s) for s, _ in warm])
    seconds = np.asarray([t for _, t in warm])
    # relative errors: each row divided by its seconds; columns scaled to one length
    matrix = np.stack([1.0 / seconds, size / seconds], axis=1)
    scale = np.linalg.norm(matrix, axis=0)
    latency, per_byte = nnls(matrix / scale, np.ones(len(warm))) / scale
    forecast = latency + per_byte * size
    error = float(np.median(np.abs(seconds / forecast - 1.0)))
    return TransferTerms(latency_s=float(latency), seconds_per_byte=float(per_byte), error=error, count=len(warm))
