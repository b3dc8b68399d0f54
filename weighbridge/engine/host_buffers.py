"""Host memory for saved KV, used again and again: touching fresh memory costs far more than copying into it.

On a virtual machine whose memory the host backs on first touch, 6 MB of fresh memory took 6 to 85 ms and the copy into
it 0.3 ms. Buffers that come back are lent again, and some are made ready while the engine has nothing to compute.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_CLASS = 1 << 20  # sizes are multiples of this, so that buffers fit more than one sequence
_PAGE = 4096

Buffer = NDArray[np.uint8]


class HostBuffers:
    """Buffers of one engine. `spare_bytes` bounds what is kept ready; what is lent is the borrower's to bound."""

    def __init__(self, spare_bytes: int, ready: int) -> None:
        """`ready` is how many buffers of the size asked for last are prepared in idle time."""
        self.spare_bytes = spare_bytes
        self._ready = ready
        self._spare: list[Buffer] = []
        self._lent: set[int] = set()
        self._last_size = 0
        self._fresh: Buffer | None = None  # being made ready
        self._touched = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of spare buffers."""
        return sum(len(buffer) for buffer in self._spare)

    def take(self, size: int) -> Buffer:
        """A buffer of `size` bytes with any content: a view of a spare one at most twice as large, or a new one."""
        self._last_size = rounded = -(-size // _CLASS) * _CLASS
        fitting = [buffer for buffer in self._spare if rounded <= len(buffer) <= 2 * rounded]
        if fitting:
            whole = min(fitting, key=len)
            self._spare = [buffer for buffer in self._spare if buffer is not whole]
        else:
            whole = np.empty(rounded, np.uint8)
        self._lent.add(id(whole))
        return whole[:size]

    def give_back(self, view: Buffer | None) -> None:
        """Take back what `take` lent, or part of it; nothing may read it afterwards. Other memory is left alone."""
        base = view if view is None or view.base is None else view.base
        if id(base) not in self._lent or not isinstance(base, np.ndarray):
            return
        self._lent.discard(id(base))
        if self.kept_bytes + len(base) <= self.spare_bytes:
            self._spare.append(base)

    def prepare(self) -> bool:
        """Touch a little of a buffer that the next saves will want; False when there is nothing to prepare."""
        if self._fresh is None:
            same = sum(len(buffer) >= self._last_size for buffer in self._spare)
            if not self._last_size or same >= self._ready or self.kept_bytes + self._last_size > self.spare_bytes:
                return False
            self._fresh, self._touched = np.empty(self._last_size, np.uint8), 0
        end = self._touched + _CLASS
        self._fresh[self._touched : end : _PAGE] = 0
        self._touched = end
        if end >= len(self._fresh):
            self._spare.append(self._fresh)
            self._fresh = None
        return True
