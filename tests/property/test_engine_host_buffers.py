"""Lent buffers never overlap, come back, and stay within their bound."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.engine.host_buffers import Buffer, HostBuffers

MIB = 1 << 20


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 3 * MIB), st.sampled_from(["back", "prepare"])), max_size=30), st.data())
def test_what_is_lent_keeps_its_bytes_until_it_comes_back(work: list[int | str], data: st.DataObject) -> None:
    buffers = HostBuffers(6 * MIB, ready=2)
    lent: list[tuple[Buffer, int]] = []
    for number, step in enumerate(work):
        if isinstance(step, int):
            view = buffers.take(step)
            assert len(view) == step
            view[:] = number % 251
            lent.append((view, number % 251))
        elif step == "prepare":
            buffers.prepare()
        elif lent:
            view, _ = lent.pop(data.draw(st.integers(0, len(lent) - 1)))
            buffers.give_back(view[: len(view) // 2])
        assert buffers.kept_bytes <= buffers.spare_bytes
        assert all((view == value).all() for view, value in lent)


def test_buffers_are_lent_again_and_made_ready_in_small_pieces() -> None:
    buffers = HostBuffers(8 * MIB, ready=2)
    assert not buffers.prepare(), "nobody asked yet"
    first = buffers.take(2 * MIB - 5)
    place = first.ctypes.data
    buffers.give_back(first)
    assert buffers.take(MIB + 1).ctypes.data == place
    pieces = 0
    while buffers.prepare():
        pieces += 1
    assert (pieces, buffers.kept_bytes) == (4, 4 * MIB)
    buffers.give_back(np.empty(MIB, np.uint8))
    buffers.give_back(None)
    assert buffers.kept_bytes == 4 * MIB, "other memory is not ours"
