"""The SSE decoders against an independent reading of the WHATWG algorithm, over any cut and any spelling."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.copied import copied
from weighbridge.http import SseParser, SseScanner
from weighbridge.http.chunked import ChunkedDecoder
from weighbridge.http.sse import EVENT_END, Splitter


def oracle(stream: bytes) -> list[tuple[str, str]]:
    """(event, data) of each dispatched event: the whole text at once, line by line, as the standard says."""
    text = stream.decode("utf-8", "replace")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    events, data, kind = [], [], ""
    lines = text.split("\n")
    for line in lines[:-1]:  # the last one is not terminated
        if line == "":
            if data:
                events.append((kind or "message", "\n".join(data)))
            data, kind = [], ""
        elif not line.startswith(":"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                data.append(value)
            elif field == "event":
                kind = value
    return events


line_ends = st.sampled_from(["\n", "\r\n", "\r"])
values = st.text(alphabet=st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=12)
lines = st.one_of(
    st.builds("data: {}".format, values),
    st.builds("data:{}".format, values),
    st.just("data"),
    st.builds(": {}".format, values),
    st.builds("event: {}".format, st.sampled_from(["x", "ping", ""])),
    st.builds("{}".format, values),
    st.just(""),
    st.just("data: [DONE]"),
    st.builds('data: {{"choices":[{{"delta":{{"content":"{}"}}}}]}}'.format, st.sampled_from(["a", "", "é", "🙂"])),
)


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    pieces = draw(st.lists(st.tuples(lines, line_ends), max_size=25))
    bom = draw(st.sampled_from(["", "", "\ufeff"]))
    return (bom + "".join(a + b for a, b in pieces)).encode()


def cut(data: bytes, points: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(p % (len(data) + 1) for p in points)})
    return [data[a:b] for a, b in pairwise(edges)]


points = st.lists(st.integers(0, 10_000), max_size=30)


@settings(max_examples=300, deadline=None)
@given(streams(), points)
def test_parser_equals_the_standard_over_any_cut(stream: bytes, where: list[int]) -> None:
    parser = SseParser()
    seen = [(e.event, e.data) for piece in cut(stream, where) for e in parser.feed(piece)]
    # a lone CR at the very end may still become CRLF: the standard dispatches at the CR, so do we
    assert seen == oracle(stream)


@settings(max_examples=300, deadline=None)
@given(streams(), points)
def test_scanner_passes_bytes_and_counts_events(stream: bytes, where: list[int]) -> None:
    scanner = SseScanner()
    out = b"".join(scanner.feed(piece) for piece in cut(stream, where))
    assert out == stream
    data = [d for _, d in oracle(stream)]
    assert scanner.done == any(d.strip(" \t\n\x0b\x0c") == "[DONE]" for d in data)
    assert scanner.events == sum(1 for d in data if d.strip(" \t\n\x0b\x0c") != "[DONE]")


contents = st.lists(st.sampled_from(["", "a", "🙂漢字", "\\n", "[DONE]", '"error"', '"usage":{']), max_size=12)


@settings(max_examples=200, deadline=None)
@given(contents, st.sampled_from(["\n", "\r\n", "\r"]), points)
def test_stripping_removes_exactly_the_usage_frame(texts: list[str], end: str, where: list[int]) -> None:
    frames = [json.dumps({"choices": [{"index": 0, "delta": {"content": t}}], "usage": None}) for t in texts]
    last = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(texts)}})
    wire = [f"data: {f}{end}{end}".encode() for f in frames]
    done = f"data: [DONE]{end}{end}".encode()
    stream = b"".join(wire) + f"data: {last}{end}{end}".encode() + done
    scanner = SseScanner(strip_usage=True)
    out = b"".join(scanner.feed(piece) for piece in cut(stream, where)) + scanner.flush()
    assert out.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"") == (b"".join(wire) + done).replace(
        b"\r\n", b"\n"
    ).replace(b"\r", b"\n").replace(b"\n", b"")
    assert [d for _, d in oracle(out)] == [*frames, "[DONE]"]
    assert scanner.usage == {"prompt_tokens": 3, "completion_tokens": len(texts)}
    assert scanner.events == len(texts)
    assert scanner.tokens_seen == any(texts)
    assert scanner.error is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), points, st.sampled_from([b"", b";x=1", b'; q="a"']))
def test_chunked_decoder_over_any_cut(chunks: list[bytes], where: list[int], extension: bytes) -> None:
    wire = b"".join(b"%x%b\r\n%b\r\n" % (len(c), extension, c) for c in chunks) + b"0\r\nx-trailer: 1\r\n\r\n"
    decoder = ChunkedDecoder()
    pieces = cut(wire, where)
    out = b""
    for i, piece in enumerate(pieces):
        assert not decoder.done, i
        out += decoder.feed(piece)
    assert out == b"".join(chunks)
    assert decoder.done
    assert decoder.rest == b""


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
@pytest.mark.parametrize("reads", [64, 1024])
@pytest.mark.parametrize("strip", [False, True])
def test_the_work_of_an_event_in_many_reads_grows_with_its_size_and_not_with_its_square(
    end: bytes, reads: int, strip: bool
) -> None:
    size = 512 * 1024
    event = b'data: {"choices":[{"delta":{"content":"' + b"a" * size + b'"}}]}' + end
    step = len(event) // reads
    pieces = [event[at : at + step] for at in range(0, len(event), step)]
    scanner = SseScanner(strip_usage=strip)
    scanner.feed(b'data: {"choices":[{"delta":{"content":"a"}}]}' + end)
    work = copied(scanner.feed, pieces)
    assert scanner.events == 2
    # in, out, the block, its data, and what growing takes; copying all that was kept with each read: reads / 2
    assert work < 8 * len(event) + 1000 * reads, f"{work / len(event):.1f} copies of each byte"


def test_reads_that_end_with_an_event_are_not_copied() -> None:
    splitter = Splitter()
    for data in (frame := b'data: {"a":1}\n\n', frame * 39):
        assert splitter.feed(data) is data
    scanner = SseScanner()
    for data in (frame, frame[:7], frame[7:], frame * 39):
        assert scanner.feed(data) is data


@settings(max_examples=300, deadline=None)
@given(streams(), points)
def test_what_is_cut_off_is_whole_and_what_is_kept_is_not(stream: bytes, where: list[int]) -> None:
    splitter = Splitter()
    seen = b""
    for piece in cut(stream, where):
        whole = splitter.feed(piece)
        seen += whole
        kept = bytes(splitter.tail)
        assert EVENT_END.search(kept) is None, "a whole event is never kept"
        if whole:
            assert whole.endswith((b"\n\n", b"\r\r", b"\n\r", b"\r\n")), "nor a part passed on as whole"
            assert EVENT_END.search(whole)
    assert seen + bytes(splitter.tail) == stream
