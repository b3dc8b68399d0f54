"""Frames of an OpenAI stream: which carry a generated token, which visible content, and what the last ones tell.

Every frame is decoded, but only into the few fields that matter here. The plain spelling (`data: {...}` and LF) takes
a short path; anything else goes through the full parser.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weighbridge.http import SseParser

MAX_EVENT_BYTES = 8 * 1024 * 1024


class _Delta(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: Any = None
    finish_reason: Any = None


class _Frame(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Frame).decode


class FrameReader:
    """Feed it the body's bytes; it returns what each read held and keeps what the stream said of itself.

    `usage` is the last usage object, `error` the first error frame, `finish` the finish reason, `done` whether
    `[DONE]` came, `malformed` the reason why a frame could not be read.
    """

    __slots__ = ("_parser", "_tail", "done", "error", "finish", "malformed", "usage")

    def __init__(self) -> None:
        self._tail = bytearray()
        self._parser: SseParser | None = None
        self.usage: dict[str, Any] | None = None
        self.error: Any = None
        self.finish = ""
        self.done = False
        self.malformed = ""

    def feed(self, data: bytes) -> tuple[int, bool]:
        """How many frames with generated tokens this read completed, and whether one of them had visible content."""
        if self._parser is None and b"\r" not in data and not data.startswith(b"\xef"):
            return self._plain(data)
        return self._full(data)

    def _plain(self, data: bytes) -> tuple[int, bool]:
        tail = self._tail
        if tail:
            ends = b"\n\n" in data or (tail[-1:] == b"\n" and data[:1] == b"\n")
            tail += data  # of a frame in many reads each byte is copied once here and once when it is whole
            if not ends:
                if len(tail) > MAX_EVENT_BYTES:
                    self.malformed = f"a frame is longer than {MAX_EVENT_BYTES} bytes"
                    self._tail = bytearray()
                return 0, False
            data = bytes(tail)
        blocks = data.split(b"\n\n")
        self._tail = bytearray(blocks.pop())
        tokens, content = 0, False
        for block in blocks:
            if not block.startswith(b"data:") or b"\n" in block:
                # comments, other fields or several data lines: rare, so left to the parser
                for event in SseParser().feed(block + b"\n\n"):
                    token, visible = self._frame(event.data.encode())
                    tokens += token
                    content |= visible
                continue
            token, visible = self._frame(block[6:] if block[5:6] == b" " else block[5:])
            tokens += token
            content |= visible
        return tokens, content

    def _full(self, data: bytes) -> tuple[int, bool]:
        if self._parser is None:
            self._parser = SseParser()
            data, self._tail = bytes(self._tail) + data, bytearray()
        tokens, content = 0, False
        try:
            events = self._parser.feed(data)
        except ValueError as error:
            self.malformed = str(error)
            return 0, False
        for event in events:
            token, visible = self._frame(event.data.encode())
            tokens += token
            content |= visible
        return tokens, content

    def _frame(self, data: bytes) -> tuple[int, bool]:
        if data.startswith(b"[DONE]"):
            self.done = True
            return 0, False
        try:
            frame = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            self.malformed = self.malformed or f"a frame is not a completion chunk ({error})"
            return 0, False
        if frame.usage is not None:
            self.usage = frame.usage
        if frame.error and self.error is None:
            self.error = frame.error
        token, visible = False, False
        for choice in frame.choices or ():
            if choice.finish_reason:
                self.finish = str(choice.finish_reason)
            delta = choice.delta
            if choice.text or (delta is not None and delta.content):
                token = visible = True
            elif delta is not None and (
                delta.reasoning
                or delta.reasoning_content
                or delta.tool_calls
                or delta.function_call
                or delta.refusal
                or delta.audio
            ):
                token = True
        return int(token), visible
