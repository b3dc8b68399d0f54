"""Memory is given back once after a burst, and really."""

import random
import sys
from pathlib import Path

import pytest

from weighbridge.gateway.memory_return import BURST_BYTES, OVER_BYTES, MemoryReturn, glibc_trim


def test_once_after_each_burst() -> None:
    trims: list[int] = []
    memory = MemoryReturn(lambda: trims.append(1))
    seen = []
    for held in (0, BURST_BYTES, BURST_BYTES + 1, OVER_BYTES, OVER_BYTES - 1, 0, BURST_BYTES * 2, 0, 0):
        thread = memory.observe(held)
        if thread is not None:
            thread.join()
        seen.append(len(trims))
    assert seen == [0, 0, 0, 0, 1, 1, 1, 2, 2]
    assert MemoryReturn(None).observe(BURST_BYTES + 1) is None


@pytest.mark.skipif(not sys.platform.startswith("linux") or glibc_trim() is None, reason="no malloc_trim here")
def test_freed_bodies_leave_the_process() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    rng = random.Random(1)
    held: list[bytes] = []
    small: list[bytes] = []
    for _ in range(400):
        held.append(b"".join([bytes(1 << 16) for _ in range(16)]))
        small.append(bytes(300))  # what stays between bodies keeps their memory from being given back by itself
        if len(held) > 100:
            held.pop(rng.randrange(len(held)))
    full = resident()
    memory = MemoryReturn(glibc_trim())
    memory.observe(100 << 20)
    held.clear()
    thread = memory.observe(0)
    assert thread is not None
    thread.join()
    assert full - resident() > 80 << 20
