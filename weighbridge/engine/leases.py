"""KV that a prefill instance keeps for a decode instance: leased, in host memory, bounded, freed on every path."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Kv = NDArray[np.uint8]


@dataclass(slots=True)
class Lease:
    """KV of the first `tokens` tokens of one request, until collected, released or expired."""

    data: Kv
    tokens: int
    expires_s: float
    timer: asyncio.TimerHandle


class Leases:
    """All leases of one instance. Lives on the event loop."""

    def __init__(self, lease_s: float, max_bytes: int) -> None:
        self.lease_s = lease_s
        self.max_bytes = max_bytes
        self.bytes = 0
        self.expired = 0
        self.refused = 0
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def put(self, key: str, data: Kv, tokens: int) -> Lease | None:
        """Keep KV under a lease; None where the bound is reached, and the decode side has to compute again."""
        if self.bytes + len(data) > self.max_bytes:
            self.refused += 1
            return None
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.lease_s, self._expire, key)
        lease = Lease(data, tokens, loop.time() + self.lease_s, timer)
        self._leases[key] = lease
        self.bytes += len(data)
        return lease

    def get(self, key: str) -> Lease | None:
        """The lease, which stays."""
        return self._leases.get(key)

    def free(self, key: str) -> bool:
        """End a lease; False where there is none (any more)."""
        lease = self._leases.pop(key, None)
        if lease is None:
            return False
        lease.timer.cancel()
        self.bytes -= len(lease.data)
        return True

    def clear(self) -> None:
        """End all."""
        for key in list(self._leases):
            self.free(key)

    def _expire(self, key: str) -> None:
        if self.free(key):
            self.expired += 1
