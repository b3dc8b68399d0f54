"""The text of a finished reply, whole or streamed, for a check that reads what the client would read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec

from weighbridge.http import SseParser


class Unreadable(ValueError):
    """A reply that holds no answer; the words say why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One text per choice, in their order. `tools`: a choice calls a tool instead of (or besides) speaking."""

    texts: tuple[str, ...]
    tools: bool = False


class _Turn(msgspec.Struct):
    content: Any = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Turn | None = None
    delta: _Turn | None = None
    text: str | None = None


class _Reply(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode = msgspec.json.Decoder(_Reply).decode


def whole_answer(body: bytes) -> Answer:
    """The answer of a chat completion or completion. Raises `Unreadable`."""
    return _gather([_read(body)])


def streamed_answer(body: bytes) -> Answer:
    """The answer of a complete event stream of either. Raises `Unreadable`, also for an error frame."""
    try:
        events = [event.data for event in SseParser().feed(body)]
    except ValueError as error:
        raise Unreadable(str(error)) from None
    return _gather([_read(data.encode()) for data in events if not data.startswith("[DONE]")])


def _read(data: bytes) -> _Reply:
    try:
        reply = _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unreadable(f"not a completion: {error}") from None
    if reply.error:
        raise Unreadable("the engine sent an error")
    return reply


def _gather(replies: list[_Reply]) -> Answer:
    texts: dict[int, list[str]] = defaultdict(list)
    tools = False
    for reply in replies:
        for choice in reply.choices:
            turn = choice.message or choice.delta
            pieces = texts[choice.index]
            if turn is not None:
                pieces.append(_text(turn.content))
                tools = tools or bool(turn.tool_calls or turn.function_call)
            elif choice.text:
                pieces.append(choice.text)
    if not texts:
        raise Unreadable("no choice in the reply")
    return Answer(tuple("".join(pieces) for _, pieces in sorted(texts.items())), tools)


def _text(content: Any) -> str:
    """A message's text: a string, or the text parts of a list."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str))
