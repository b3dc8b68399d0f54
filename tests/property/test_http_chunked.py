"""Chunks taken many at a time are those taken one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.http.chunked import ChunkedDecoder, framed

PIECES = st.sampled_from([b"a", b"data: x\n\n", b"y" * 150, b"\r\n", b"1\r\nz\r\n", b"q" * 300, b"\r", b"0\r\n\r\n"])
LINES = st.sampled_from(
    [*[b"%x\r\n%b\r\n"] * 20, b"0%x\r\n%b\r\n", b"%X;a=b\r\n%b\r\n", b"%x\r\n%b\n\r\n", b"%x\r\n%bb\r\n"]
)


def decode(reads: list[bytes]) -> tuple[bytes, bool, bytes] | str:
    decoder = ChunkedDecoder()
    payload = b""
    try:
        for data in reads:
            payload += decoder.feed(data)
    except ValueError as error:
        return str(error)
    return payload, decoder.done, decoder.rest


@given(st.lists(st.tuples(st.lists(PIECES, min_size=1, max_size=4), LINES), min_size=1, max_size=8), st.booleans())
def test_a_read_of_many_chunks_is_as_good_as_one_read_for_each(
    chunks: list[tuple[list[bytes], bytes]], ended: bool
) -> None:
    wire = []
    for pieces, line in chunks:
        data = b"".join(pieces)
        wire.append(line % (len(data), data))
    wire += [b"0\r\n\r\n"] if ended else []
    whole = b"".join(wire)
    assert decode([whole]) == decode([whole[n : n + 7] for n in range(0, len(whole), 7)])


def test_a_size_that_does_not_fit_its_chunk_is_refused() -> None:
    good = b"64\r\n" + b"a" * 100 + b"\r\n"
    bad = b"65\r\n" + b"a" * 100 + b"\r\n"
    assert decode([good * 8]) == (b"a" * 800, False, b"")
    assert decode([good]) == (b"a" * 100, False, b"")
    for wire in (bad, good * 4 + bad + good * 4):
        with pytest.raises(ValueError, match="chunk"):
            ChunkedDecoder().feed(wire)


@pytest.mark.parametrize("size", [1, 4095, 4096, 70_000])
def test_what_is_framed_is_what_is_decoded(size: int) -> None:
    data = b"x" + b"\r\n" * (size // 2) + b"y" * (size % 2)
    assert decode([framed(data)]) == (data, False, b"")
