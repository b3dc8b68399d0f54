"""Gives memory back to the system after a burst of large bodies: the C library keeps freed memory unless it is asked.

glibc alone can be asked (`malloc_trim`); elsewhere nothing happens. It takes some 20 ms per 100 MB, in a thread, and
holds the allocator's lock meanwhile, so it is done once, when a burst is over.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

BURST_BYTES = 64 * 1024 * 1024
OVER_BYTES = 4 * 1024 * 1024


def glibc_trim() -> Callable[[], object] | None:
    """The function that gives memory back, or None."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None
    return lambda: trim(0)


class MemoryReturn:
    """Watches how many bytes of bodies are held."""

    def __init__(self, trim: Callable[[], object] | None) -> None:
        self._trim = trim
        self._burst = False

    def observe(self, held_bytes: int) -> threading.Thread | None:
        """Call it a few times a second; returns the thread that trims, where one was started."""
        if held_bytes > BURST_BYTES:
            self._burst = True
        elif self._burst and held_bytes < OVER_BYTES:
            self._burst = False
            if self._trim is not None:
                thread = threading.Thread(target=self._trim, name="memory-return", daemon=True)
                thread.start()
                return thread
        return None
