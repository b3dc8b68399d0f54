"""What of a request the selector reads: the last user turn, then the system text, then earlier turns.

What tells tasks apart sits near the start of a turn, so every part keeps its head; the last turn keeps a tail
too, because instructions often follow a long paste. Nothing is cut without being reported in `truncated`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

TEXT_VERSION = "text/1"
MAX_TOOL_NAMES = 16


class TextLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Characters kept. `head` and `tail` are of the last user turn, `context` is the head of every other part."""

    head: int = 2720
    tail: int = 1376
    context: int = 600
    total: int = 4096

    @property
    def version(self) -> str:
        return f"{TEXT_VERSION}:{self.head}+{self.tail}+{self.context}/{self.total}"


@dataclass(frozen=True, slots=True)
class RoutingText:
    """`text` is what is encoded; `prompt_bytes` is the UTF-8 size of everything the model would have to read."""

    text: str
    prompt_bytes: int
    truncated: bool = False
    has_tools: bool = False
    tool_names: tuple[str, ...] = ()
    modalities: frozenset[str] = frozenset({"text"})


def clip(text: str, head: int, tail: int) -> str:
    """`text` whole when it fits, else its first `head` and last `tail` characters, a line break between them."""
    if len(text) <= head + tail:
        return text
    return text[:head] + "\n" + (text[-tail:] if tail > 0 else "")


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def routing_text(
    messages: Sequence[object], tools: Sequence[object] = (), limits: TextLimits | None = None
) -> RoutingText:
    """Build the routing text of an OpenAI-style request; parts of an unknown shape are passed over.

    `messages` are decoded JSON objects with `role`, `content` (a string, a list of parts or null) and perhaps
    `tool_calls`. `tools` are the request's tool definitions.
    """
    limits = limits or TextLimits()
    modalities = {"text"}
    turns: list[tuple[str, str]] = []
    prompt_bytes = 0
    for message in messages:
        if isinstance(message, Mapping):
            text = _message_text(message, modalities)
            turns.append((str(message.get("role", "user")), text))
            prompt_bytes += utf8_bytes(text)
    names = tuple(_tool_names(tools))
    prompt_bytes += sum(_json_size(tool) for tool in tools)
    last = next((i for i in range(len(turns) - 1, -1, -1) if turns[i][0] == "user"), len(turns) - 1)
    text, truncated = _assemble(turns, last, names, limits)
    return RoutingText(text, prompt_bytes, truncated, bool(tools), names, frozenset(modalities))


def plain_text(text: str, limits: TextLimits | None = None) -> RoutingText:
    """The routing text of one user turn."""
    return routing_text([{"role": "user", "content": text}], (), limits)


def _assemble(turns: list[tuple[str, str]], last: int, names: tuple[str, ...], limits: TextLimits) -> tuple[str, bool]:
    if not turns:
        return " ".join(names[:MAX_TOOL_NAMES]), False
    main = clip(turns[last][1], limits.head, limits.tail)
    truncated = len(main) < len(turns[last][1])
    parts, room = [main], limits.total - len(main)
    system = [i for i, (role, _) in enumerate(turns) if role in ("system", "developer") and i != last]
    earlier = [i for i in range(len(turns) - 1, -1, -1) if i != last and i not in system]
    for index in system + earlier:
        text = turns[index][1]
        kept = text[: max(0, min(limits.context, room - 1))]
        truncated |= len(kept) < len(text)
        if kept:
            parts.append(kept)
            room -= len(kept) + 1
    if names and room > 1:
        parts.append(" ".join(names[:MAX_TOOL_NAMES])[: room - 1])
    return "\n".join(parts), truncated


def _message_text(message: Mapping[str, object], modalities: set[str]) -> str:
    pieces: list[str] = []
    content = message.get("content")
    if isinstance(content, str):
        pieces.append(content)
    elif isinstance(content, Sequence):
        pieces.extend(_part_text(part, modalities) for part in content)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            pieces.append(f"{function.get('name', '')} {function.get('arguments', '')}")
    return "\n".join(piece for piece in pieces if piece)


def _part_text(part: object, modalities: set[str]) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return ""
    kind = str(part.get("type", "text"))
    if "image" in kind:
        modalities.add("vision")
    elif "audio" in kind:
        modalities.add("audio")
    elif "file" in kind:
        modalities.add("file")
    text = part.get("text", part.get("refusal", ""))
    return text if isinstance(text, str) else ""


def _tool_names(tools: Iterable[object]) -> Iterable[str]:
    for tool in tools:
        if isinstance(tool, Mapping):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
            if isinstance(name, str) and name:
                yield name


def _json_size(value: object) -> int:
    """A cheap count of the bytes that a JSON value would take; strings as UTF-8, no white space."""
    if isinstance(value, str):
        return utf8_bytes(value) + 2
    if isinstance(value, Mapping):
        return 2 + sum(_json_size(k) + _json_size(v) + 2 for k, v in value.items())
    if isinstance(value, Sequence):
        return 2 + sum(_json_size(item) + 1 for item in value)
    return 5
