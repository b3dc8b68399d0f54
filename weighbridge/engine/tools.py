"""Tool calls in the Hermes form, `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which many templates use.

Reads `tools` and `tool_choice`, makes the grammar that forces a call, and finds calls in generated text as it streams.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from weighbridge.core.errors import RequestError
from weighbridge.engine.fields import Body
from weighbridge.engine.schema import combine, schema_grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """One call: arguments are JSON text, as OpenAI has it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one request. `forced` holds the names of which one must be called, or is empty."""

    definitions: list[dict[str, Any]]
    forced: tuple[str, ...] = ()
    parallel: bool = True

    def grammar(self) -> str | None:
        """A grammar of one forced call; None where the model is free."""
        if not self.forced:
            return None
        options = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": tool["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", "arguments"],
            }
            for tool in self.definitions
            if tool["function"]["name"] in self.forced
        ]
        return combine(schema_grammar({"anyOf": options}, "tools"), OPEN + "\n", "\n" + CLOSE)


def read_tools(body: Body, supported: bool) -> Tools | None:
    """`tools` and `tool_choice`; None where there are none or the choice is `none`.

    Raises:
        RequestError: bad definitions, or a model whose template does not know tools.
    """
    definitions = body.get("tools")
    if not definitions:
        return None
    if not isinstance(definitions, list) or not all(_is_tool(tool) for tool in definitions):
        raise RequestError("tools must be a list of functions, each with a name", param="tools")
    choice: Any = body.get("tool_choice") or "auto"
    if choice == "none":
        return None
    if not supported:
        message = "this model's chat template does not know tools"
        raise RequestError(message, code="unsupported_parameter", param="tools")
    names = tuple(tool["function"]["name"] for tool in definitions)
    parallel = body.get("parallel_tool_calls") is not False
    if choice == "auto":
        return Tools(definitions, (), parallel)
    if choice == "required":
        return Tools(definitions, names, parallel)
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if name not in names:
        raise RequestError("tool_choice must be none, auto, required or name one of the tools", param="tool_choice")
    return Tools(definitions, (str(name),), parallel)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str) and bool(function["name"])


class ToolParser:
    """Splits a stream of text into content and calls. What may become a call is held back until it is decided."""

    __slots__ = ("_buffer", "_state", "calls")

    def __init__(self) -> None:
        self._buffer = ""
        self._state: Literal["text", "call"] = "text"
        self.calls = 0

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """Content and whole calls that are ready after more text."""
        self._buffer += text
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            mark = OPEN if self._state == "text" else CLOSE
            at = self._buffer.find(mark)
            if at < 0:
                break
            before, self._buffer = self._buffer[:at], self._buffer[at + len(mark) :]
            if self._state == "text":
                content.append(before if before.strip() else "")
                self._state = "call"
            else:
                self._state = "text"
                call = _parse(before)
                if call is None:
                    content.append(OPEN + before + CLOSE)
                else:
                    calls.append(call)
                    self.calls += 1
        if self._state == "text":
            keep = next((n for n in range(len(OPEN) - 1, 0, -1) if self._buffer.endswith(OPEN[:n])), 0)
            ready = self._buffer[: len(self._buffer) - keep]
            self._buffer = self._buffer[len(ready) :]
            if not (self.calls and not ready.strip()):  # blank space between calls is no content
                content.append(ready)
        return "".join(content), calls

    def flush(self) -> str:
        """What is left at the end: text that only looked like the start of a call."""
        rest, self._buffer = self._buffer, ""
        return (OPEN + rest) if self._state == "call" else rest


def _parse(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{secrets.token_hex(12)}", value["name"], encoded)
