"""A whole reply put together from a stream, for engines that notice only in a stream that their client has left. Pure.

The reply has what the engine's own whole reply has: texts, tool calls, logprobs, finish reasons, usage, and every
other key of the frames as last said.
"""

from __future__ import annotations

from typing import Any

import msgspec

from weighbridge.gateway.splice import replace_value
from weighbridge.http import SseParser

MAX_BYTES = 32 << 20
ENDPOINTS = frozenset({"chat", "completions"})
_STREAMED = {"chat.completion.chunk": "chat.completion"}


def stream_body(body: bytes) -> bytes:
    """The same request, asked for as a stream that ends with its usage."""
    return replace_value(replace_value(body, "stream", b"true"), "stream_options", b'{"include_usage":true}')


class Assembler:
    """Fed with the bytes of a stream. `error` is the data of an error frame; `complete` once it ended as it should."""

    def __init__(self) -> None:
        self._parser = SseParser()
        self._bytes = 0
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._done = False
        self.error: str | None = None
        self.frames = 0
        """Frames with something generated."""

    @property
    def complete(self) -> bool:
        """Whether it ended, or every choice did."""
        finished = bool(self._choices) and all(c.get("finish_reason") for c in self._choices.values())
        return self.error is None and (self._done or finished)

    def feed(self, data: bytes) -> None:
        """Raises ValueError: not the JSON of completions, or longer than any reply."""
        self._bytes += len(data)
        if self._bytes > MAX_BYTES:
            raise ValueError(f"the reply is longer than {MAX_BYTES} bytes")
        for event in self._parser.feed(data):
            if event.data == "[DONE]":
                self._done = True
                continue
            try:
                frame = msgspec.json.decode(event.data.encode())
            except msgspec.DecodeError as error:
                raise ValueError(f"a frame is not JSON: {error}") from None
            if not isinstance(frame, dict):
                raise ValueError("a frame is no JSON object")
            if frame.get("error"):
                self.error = event.data
                continue
            try:
                self._frame(frame)
            except (TypeError, IndexError, AttributeError) as error:
                raise ValueError(f"a frame is no part of a completion: {error}") from None

    def body(self) -> bytes:
        """The whole reply as JSON."""
        kind = self._top.get("object")
        choices = [self._choices[index] for index in sorted(self._choices)]
        return msgspec.json.encode({**self._top, "object": _STREAMED.get(str(kind), kind), "choices": choices})

    def _frame(self, frame: dict[str, Any]) -> None:
        choices = frame.pop("choices", None) or []
        for key, value in frame.items():
            if value is not None or key not in self._top:
                self._top[key] = value
        for piece in choices:
            if isinstance(piece, dict):
                self._choice(piece)

    def _choice(self, piece: dict[str, Any]) -> None:
        index = piece.get("index")
        kept = self._choices.setdefault(index if isinstance(index, int) else 0, {})
        for key, value in piece.items():
            if key == "delta":
                message = kept.setdefault("message", {"role": "assistant", "content": None})
                if isinstance(value, dict):
                    self.frames += any(v for k, v in value.items() if k != "role")
                    _merge(message, value)
            elif key == "text":
                kept["text"] = kept.get("text", "") + (value or "")
                self.frames += bool(value)
            elif key == "logprobs" and isinstance(value, dict):
                _extend(kept, key, value)
            elif value is not None or key not in kept:
                kept[key] = value


def _merge(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        known = message.get(key)
        if key == "tool_calls" and isinstance(value, list):
            _tool_calls(message.setdefault(key, []), value)
        elif isinstance(value, str) and key != "role":
            message[key] = (known or "") + value
        elif isinstance(value, list) and isinstance(known, list):
            known.extend(value)
        elif value is not None:
            message[key] = value


def _tool_calls(calls: list[dict[str, Any]], pieces: list[Any]) -> None:
    """Deltas of one call share its index; names and arguments come in pieces."""
    for piece in pieces:
        if not isinstance(piece, dict):
            continue
        index = piece.get("index", len(calls))
        while isinstance(index, int) and len(calls) <= index < 1024:
            calls.append({})
        call = calls[index]
        for key, value in piece.items():
            if key == "function" and isinstance(value, dict):
                function = call.setdefault("function", {})
                for name, text in value.items():
                    function[name] = function.get(name, "") + text if isinstance(text, str) else text
            elif key != "index" and value is not None:
                call[key] = value


def _extend(kept: dict[str, Any], key: str, value: dict[str, Any]) -> None:
    """Logprobs are lists per token."""
    known = kept.get(key)
    if not isinstance(known, dict):
        known = kept[key] = {}
    for name, items in value.items():
        if isinstance(items, list) and isinstance(known.get(name), list):
            known[name].extend(items)
        elif items is not None or name not in known:
            known[name] = items
