"""What counts as a token, in every spelling of a stream and over every cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.copied import copied
from weighbridge.bench.frames import FrameReader

COMPAT = Path(__file__).resolve().parents[2].parent / "shared" / "compat"


def frame(delta: dict[str, Any] | None = None, **extra: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta}]
    return b"data: " + json.dumps({"choices": choices, **extra}, ensure_ascii=False).encode() + b"\n\n"


def read(*pieces: bytes) -> tuple[list[int], FrameReader]:
    reader = FrameReader()
    return [reader.feed(piece)[0] for piece in pieces], reader


def test_empty_frames_carry_no_token() -> None:
    pieces = [
        b'data: {"choices":[]}\n\n',
        frame({"role": "assistant", "content": ""}),
        b'data: {"id":"x"}\n\n',
        b'data: {"choices":null}\n\n',
        frame({"content": "a"}),
        frame(usage={"completion_tokens": 1}),
        b"data: [DONE]\n\n",
    ]
    counts, reader = read(*pieces)
    assert counts == [0, 0, 0, 0, 1, 0, 0]
    assert reader.usage == {"completion_tokens": 1}
    assert reader.done
    assert not reader.malformed


def test_comments_are_no_tokens() -> None:
    counts, reader = read(b": PROCESSING\n\n", b": PROCESSING\n\n" + frame({"content": "a"}), b":\n\n")
    assert counts == [0, 1, 0]
    assert not reader.malformed


@pytest.mark.parametrize(
    ("delta", "visible"),
    [
        ({"reasoning": "hm"}, False),
        ({"reasoning_content": "hm"}, False),
        ({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}, False),
        ({"refusal": "no"}, False),
        ({"content": "a"}, True),
    ],
)
def test_a_token_of_any_kind_counts_and_content_apart(delta: dict[str, Any], visible: bool) -> None:
    assert FrameReader().feed(frame(delta)) == (1, visible)


def test_completions_text_counts() -> None:
    assert FrameReader().feed(b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n') == (1, True)
    assert FrameReader().feed(b'data: {"choices":[{"text":"","finish_reason":"stop"}]}\n\n') == (0, False)


SPELLINGS = {
    "lf": lambda body: body,
    "crlf": lambda body: body.replace(b"\n", b"\r\n"),
    "cr": lambda body: body.replace(b"\n", b"\r"),
    "mixed": lambda body: body.replace(b"\n\n", b"\n\r\n", 1),
    "no space": lambda body: body.replace(b"data: ", b"data:"),
    "two data lines": lambda body: body.replace(b'"delta"', b'\ndata: "delta"', 1),
    "byte order mark": lambda body: b"\xef\xbb\xbf" + body,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_cut_at_every_byte_reads_the_same(name: str) -> None:
    plain = (
        frame({"content": "雪"})
        + frame({"content": "🙂"})
        + frame(usage={"completion_tokens": 2})
        + b"data: [DONE]\n\n"
    )
    body = SPELLINGS[name](plain)
    for cut in range(1, len(body)):
        counts, reader = read(body[:cut], body[cut:])
        assert sum(counts) == 2, cut
        assert reader.usage == {"completion_tokens": 2}
        assert reader.done
        assert not reader.malformed
    counts, reader = read(*(body[k : k + 1] for k in range(len(body))))
    assert (sum(counts), reader.done) == (2, True)


@pytest.mark.parametrize("reads", [32, 512])
def test_the_work_of_a_frame_in_many_reads_grows_with_its_size_and_not_with_its_square(reads: int) -> None:
    body = frame({"content": "a" * 500_000})
    step = len(body) // reads
    reader = FrameReader()
    work = copied(reader.feed, [body[at : at + step] for at in range(0, len(body), step)])
    assert work < 8 * len(body) + 1000 * reads, f"{work / len(body):.1f} copies of each byte"
    assert reader.feed(frame({"content": "b"})) == (1, True)


def test_a_frame_beyond_any_bound_is_damage_and_is_not_kept() -> None:
    reader = FrameReader()
    for _ in range(10):
        reader.feed(b"data: " + b"a" * 1_000_000)
    assert "longer than" in reader.malformed
    assert len(reader._tail) < 2_000_000


def test_damage_is_kept_as_a_reason() -> None:
    _, reader = read(frame({"content": "a"}), b"data: {not json\n\n")
    assert "not a completion chunk" in reader.malformed
    _, reader = read(b'data: {"error":{"message":"out of memory"}}\n\n')
    assert reader.error == {"message": "out of memory"}


@pytest.mark.skipif(not COMPAT.is_dir(), reason="needs ../shared/compat")
@pytest.mark.parametrize(
    "name",
    ["vllm/stream_chat_usage", "vllm/stream_comp_usage", "vllm/stream_chat_contusage", "llamacpp/stream_chat_usage"],
)
def test_recorded_streams_of_real_engines(name: str) -> None:
    body = (COMPAT / f"{name}.sse").read_bytes()
    counts, reader = read(body)
    assert reader.done
    assert reader.usage is not None
    # an end-of-sequence token is in usage and has no text of its own
    assert reader.usage["completion_tokens"] - 1 <= sum(counts) <= reader.usage["completion_tokens"]
