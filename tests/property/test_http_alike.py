"""Events recognised by their likeness to those before must count exactly as if each were looked at."""

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.http import SseScanner
from weighbridge.http.alike import MOST_MISSES

texts = st.sampled_from(
    [
        "a",
        "b",
        " hello",
        " help",
        "",
        "usage",
        "error",
        "[DONE]",
        'q"q',
        "b\\",
        "\\",
        "\n",
        "\r",
        "é",
        "🙂",
        '":{"usage',
    ]
)
nasty = st.sampled_from(
    [
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}},
        {"error": {"message": "x"}},
        {"error": None, "choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]},
        {"choices": [{"index": 1, "delta": {"content": "a"}, "finish_reason": None}], "usage": {"prompt_tokens": 1}},
        "[DONE]",
        "not JSON",
    ]
)


@st.composite
def events(draw: st.DrawFn) -> list[bytes]:
    """Mostly of one shape, with texts that look like structure, and now and then something else."""
    key = draw(st.sampled_from(["content", "text", "reasoning"]))
    null = draw(st.booleans())
    plain = draw(st.booleans())
    found = []
    for text in draw(st.lists(st.one_of(texts, texts, texts, texts, nasty), min_size=12, max_size=40)):
        value: object = text
        if isinstance(text, str) and text not in ("[DONE]", "not JSON"):
            choice: dict[str, object] = {"index": 0, "delta": {key: text}}
            if null:
                choice["finish_reason"] = None
            value = {"id": text if draw(st.integers(0, 20)) == 0 else "c", "choices": [choice]}
        dump = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=plain)
        found.append(f"data: {dump}\n\n".encode())
    return found


def seen(scanner: SseScanner, reads: list[bytes]) -> tuple[object, ...]:
    out = b"".join(scanner.feed(read) for read in reads) + scanner.flush()
    return out, scanner.events, scanner.tokens_seen, scanner.done, scanner.finish, scanner.error, scanner.usage


@settings(max_examples=400, deadline=None)
@given(events(), st.booleans(), st.lists(st.integers(0, 10_000), max_size=12), st.booleans())
def test_likeness_changes_nothing(stream: list[bytes], strip: bool, where: list[int], each: bool) -> None:
    whole = b"".join(stream)
    edges = sorted({0, len(whole), *(point % (len(whole) + 1) for point in where)})
    reads = stream if each else [whole[a:b] for a, b in pairwise(edges)]
    plain = SseScanner(strip_usage=strip)
    plain._alike._misses = MOST_MISSES + 1  # never learns
    assert seen(SseScanner(strip_usage=strip), reads) == seen(plain, reads)


def frame(text: str, **more: object) -> bytes:
    value = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], **more}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def test_a_longer_stream_is_soon_known() -> None:
    scanner = SseScanner()
    for text in ("", *"abcdefgh", "one", "two", "usage", "error", "two\n"):
        scanner.feed(frame(text))
    assert (scanner.events, scanner._alike._hits) == (14, 4)


def test_a_key_that_changes_is_never_taken_for_text() -> None:
    scanner = SseScanner()
    for name in (*(chr(code) * 2 for code in range(97, 117)), "usage"):
        scanner.feed(frame("x", **{name: {"prompt_tokens": 7}}))
    assert scanner.usage == {"prompt_tokens": 7}
    assert scanner._alike._hits == 0


def test_what_is_never_alike_is_soon_left_alone() -> None:
    scanner = SseScanner()
    for number in range(100):
        scanner.feed(frame(str(number), id=f"c{number}"))
    assert (scanner.events, scanner._alike._hits) == (100, 0)
    assert scanner._alike._misses == MOST_MISSES + 1
