"""Server-sent events on their way through a relay: where one ends, over any cut and any line ending, and what the
relay must know of each.

Per read there are a few searches at C speed; single events are looked at only until the first token and where a marker
(usage, error) was found. `sse_parser.py` decodes events for those who read them.
"""

import re
from typing import Any, Final

import msgspec

from weighbridge.http.alike import Alike

# Python's `re` would otherwise split CRLF in two: atomic groups keep it one line end.
EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
LINE = re.compile(rb"\r\n|\n|\r")
# Keys that mostly stand with null; a stream in which one does not needs a closer look at that event.
_NULLABLE = (
    (b'"usage"', b'"usage":null', b'"usage": null'),
    (b'"finish_reason"', b'"finish_reason":null', b'"finish_reason": null'),
)
_NOT_NULL = {name: re.compile(re.escape(name) + rb"(?!\s*:\s*null)") for name, _, _ in _NULLABLE}
SEAM = 3
"""An event's end has at most four bytes, so one that begins in an earlier read has at most three there."""
BOM = b"\xef\xbb\xbf"
MARKS = (b"[DONE]", b'"error"')
LAST_TYPES = frozenset({"message_stop", "response.completed", "response.incomplete"})
TYPED_MARKS = (*MARKS, b'"response.failed"', *(b'"%b"' % t.encode() for t in sorted(LAST_TYPES)))
MAX_EVENT_BYTES = 8 * 1024 * 1024
FEW = 8
"""Of a stream with so few events it is not worth learning what they have in common."""
_decode: Final = msgspec.json.Decoder().decode


def event_data(block: bytes) -> bytes | None:
    """The data of one event's bytes (its `data` lines joined by LF), or None if it has no data line."""
    parts = []
    for line in LINE.split(block):
        if line.startswith(b"data:"):
            parts.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            parts.append(b"")
    return b"\n".join(parts) if parts else None


class Splitter:
    """Cuts a byte stream behind each blank line; keeps the unfinished rest.

    Reads that end with an event are passed on as they are. Of an event that comes in many reads each byte is copied
    once into `tail` and once out of it, however many reads there are.
    """

    __slots__ = ("_first", "tail")

    def __init__(self) -> None:
        self.tail = bytearray()
        self._first = True

    def feed(self, data: bytes) -> bytes:
        """All whole events in `data` and what was kept; the unfinished rest is in `tail`."""
        tail = self.tail
        if self._first:
            if len(tail) + len(data) < 3 and BOM.startswith(bytes(tail) + data):
                tail += data
                return b""
            self._first = False
        if data[-2:] == b"\n\n":
            cut = len(data)
        else:
            cut = data.rfind(b"\n\n") + 2 if b"\r" not in data else self._last_end(data)
            if cut < 2:
                # an end of two characters or more may lie across the two: what is kept holds none itself
                cut = self._last_end(bytes(tail[-SEAM:]) + data[:SEAM]) - min(len(tail), SEAM) if tail else 0
                cut = max(cut, 0)
        if len(data) - cut + (0 if cut else len(tail)) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        if not cut:
            tail += data
            return b""
        if tail:
            tail += data[:cut]
            whole = bytes(tail)
            self.tail = bytearray(data[cut:])
            return whole
        if cut == len(data):
            return data
        tail += data[cut:]
        return data[:cut]

    @staticmethod
    def _last_end(data: bytes) -> int:
        cut = 0
        for match in EVENT_END.finditer(data):
            cut = match.end()
        return cut


class SseScanner:
    """Watches a relayed stream.

    `events` counts data events other than `[DONE]` and usage-only ones, `tokens_seen` turns True with the first
    generated token of any kind, `usage` holds the last usage object (decoded), `error` the first error frame's object,
    `done` and `finish` whether `[DONE]` and a finish reason were seen.

    With `strip_usage` a frame whose `choices` is empty and which carries usage is withheld from what `feed` returns.
    """

    __slots__ = (
        "_alike",
        "_marks",
        "_splitter",
        "_started",
        "_strip",
        "done",
        "error",
        "events",
        "finish",
        "tokens_seen",
        "usage",
    )

    def __init__(self, strip_usage: bool = False, typed: bool = False) -> None:
        """`typed`: the events name their type (OpenAI responses, Anthropic messages) and end with a named one."""
        self._splitter = Splitter()
        self._marks = TYPED_MARKS if typed else MARKS
        self._alike = Alike()
        self._started = False
        self._strip = strip_usage
        self.events = 0
        self.tokens_seen = False
        self.done = False
        self.finish = False
        self.error: Any = None
        self.usage: dict[str, Any] | None = None

    def feed(self, data: bytes) -> bytes:
        """Scans one read; returns what may be sent on: `data` itself, or whole events while stripping."""
        whole = self._splitter.feed(data)
        if not whole:
            return b"" if self._strip else data
        kept = self._scan(whole)
        return kept if self._strip else data

    def flush(self) -> bytes:
        """At the end of the stream: an unfinished event that stripping held back."""
        tail, self._splitter.tail = self._splitter.tail, bytearray()
        return bytes(tail) if self._strip else b""

    @property
    def partial(self) -> bool:
        """True while an event has begun and not ended."""
        return bool(self._splitter.tail)

    def _scan(self, whole: bytes) -> bytes:
        if self.tokens_seen:
            count = self._alike.count(whole)
            if count:
                self.events += count
                return whole
        blocks = whole.count(b"\n\n")
        plain = (
            whole[:5] == b"data:"
            and whole.count(b"\n") == 2 * blocks
            and whole.count(b"\ndata:") + 1 == blocks
            and b"\r" not in whole
        )
        if not plain:  # comments, other fields, data over several lines, other line ends
            return self._scan_each(whole, 0)
        start = 0
        while not self.tokens_seen:
            end = whole.find(b"\n\n", start)
            if end < 0:
                return whole
            if not self._look(whole[start:end]) and self._strip:
                return whole[:start] + self._scan_each(whole, end + 2)
            start = end + 2
        marker = self._marker(whole, start)
        if marker < 0:
            self.events += whole.count(b"\n\n", start) if start else blocks
            if self.events > FEW:
                self._alike.learn(whole, start)
            return whole
        cut = whole.rfind(b"\n\n", start, marker) + 2
        if cut < 2:
            cut = start
        self.events += whole.count(b"\n\n", start, cut)
        return whole[:cut] + self._scan_each(whole, cut)

    def _marker(self, whole: bytes, start: int) -> int:
        """Where the first thing stands that needs a closer look, or -1."""
        first = len(whole)
        for needle in self._marks:
            found = whole.find(needle, start, first)
            if found >= 0:
                first = found
        for name, null, spaced in _NULLABLE:
            named = whole.count(name, start, first)
            if not named:
                continue
            named -= whole.count(null, start, first)
            if named and named != whole.count(spaced, start, first):
                match = _NOT_NULL[name].search(whole, start, first)
                if match:
                    first = match.start()
        return first if first < len(whole) else -1

    def _scan_each(self, whole: bytes, start: int) -> bytes:
        kept = []
        for match in EVENT_END.finditer(whole, start):
            block = whole[start : match.start()]
            if self._look(block) or not self._strip:
                kept.append(whole[start : match.end()])
            start = match.end()
        kept.append(whole[start:])
        return b"".join(kept)

    def _look(self, block: bytes) -> bool:
        """Takes note of one event; False if it is a usage-only frame."""
        if not self._started:
            self._started = True
            block = block.removeprefix(BOM)
        data = event_data(block)
        if data is None:
            return True
        if data.strip() == b"[DONE]":
            self.done = True
            return True
        if self.tokens_seen and self._marker(data, 0) < 0:
            self.events += 1
            return True
        frame: Any
        try:
            frame = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError):
            frame = None
        if not isinstance(frame, dict):
            self.events += 1
            return True
        return self._note(frame)

    def _note(self, frame: dict[str, Any]) -> bool:
        error = frame.get("error")
        if error and self.error is None:
            self.error = error
        usage = frame.get("usage")
        if isinstance(usage, dict):
            self.usage = {**(self.usage or {}), **usage}
        inner = frame.get("response") or frame.get("message")
        if isinstance(inner, dict):
            self._note_inner(inner)
        choices = frame.get("choices")
        if isinstance(usage, dict) and choices == [] and not error:
            return False
        self.events += 1
        if not self.tokens_seen:
            self.tokens_seen = has_token(frame)
        if isinstance(choices, list):
            self.finish = self.finish or any(isinstance(c, dict) and c.get("finish_reason") for c in choices)
        elif frame.get("type") in LAST_TYPES:
            self.done = True
        return True

    def _note_inner(self, inner: dict[str, Any]) -> None:
        """The object within a typed event: usage and error stand there."""
        usage = inner.get("usage")
        if isinstance(usage, dict):
            self.usage = {**(self.usage or {}), **usage}
        if inner.get("error") and self.error is None:
            self.error = inner["error"]


def has_token(frame: dict[str, Any]) -> bool:
    """Whether a frame carries generated text of any kind: content, reasoning, refusal or tool call."""
    choices = frame.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            if not isinstance(choice, dict):
                continue
            if choice.get("text"):
                return True
            delta = choice.get("delta")
            if isinstance(delta, dict) and any(v for k, v in delta.items() if k != "role"):
                return True
        return False
    kind = frame.get("type")
    return isinstance(kind, str) and kind.endswith("delta")
