"""Exact prompt lengths by a model's own `tokenizer.json`, for fleets to which a good estimate is not enough.

Counting takes about two milliseconds per thousand tokens on a request's way, so it is done for the models that name a
file only. What the chat template adds is learned from the engines' usage: a constant and so much per message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from weighbridge.core.errors import ConfigError

if TYPE_CHECKING:
    from weighbridge.gateway.client_request import ClientRequest

PRIOR_PER_MESSAGE = 4.0
"""What most templates put around a message, until an engine has told."""
MEMORY = 0.1


class _Body(msgspec.Struct):
    messages: list[Any] = []
    prompt: Any = None
    tools: msgspec.Raw = msgspec.Raw(b"")


class TokenCounter:
    """Counts the prompts of one model. `encode` tells the number of tokens of a text without special ones."""

    def __init__(self, encode: Callable[[str], int]) -> None:
        self._encode = encode
        self._added: dict[tuple[str, int], float] = {}

    def tokens(self, request: ClientRequest) -> int | None:
        """The prompt's length; None for an endpoint or a form that it does not read."""
        counted = self._count(request)
        if counted is None:
            return None
        key, tokens = counted
        return max(tokens + round(self._expected(key)), 1)

    def learn(self, request: ClientRequest, prompt_tokens: int) -> None:
        """An engine counted the prompt: the difference is what its template adds to so many messages."""
        counted = self._count(request)
        if counted is None:
            return
        key, tokens = counted
        if key not in self._added and len(self._added) >= 1000:
            return
        known = self._added.get(key)
        added = float(prompt_tokens - tokens)
        self._added[key] = added if known is None else known + MEMORY * (added - known)

    def _expected(self, key: tuple[str, int]) -> float:
        known = self._added.get(key)
        if known is not None:
            return known
        endpoint, messages = key
        near = [(abs(n - messages), n) for kind, n in self._added if kind == endpoint]
        if not near:
            return PRIOR_PER_MESSAGE * messages
        other = min(near)[1]
        return self._added[endpoint, other] + PRIOR_PER_MESSAGE * (messages - other)

    def _count(self, request: ClientRequest) -> tuple[tuple[str, int], int] | None:
        if request.endpoint not in ("chat", "completions") or request.media:
            return None
        try:
            body = msgspec.json.decode(request.body, type=_Body)
        except msgspec.DecodeError:
            return None
        if request.endpoint == "completions":
            prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            if not isinstance(prompts, list) or not all(isinstance(p, str) for p in prompts):
                return None
            return ("completions", len(prompts)), sum(self._encode(p) for p in prompts)
        tokens = sum(self._encode(text) for message in body.messages for text in _texts(message))
        if body.tools:
            tokens += self._encode(bytes(body.tools).decode())
        return ("chat", len(body.messages)), tokens


def _texts(message: Any) -> Iterator[str]:
    """The texts of a message, whatever the shape of its content."""
    if not isinstance(message, dict):
        return
    yield str(message.get("role") or "")
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            yield text
    for call in message.get("tool_calls") or ():
        if isinstance(call, dict):
            yield msgspec.json.encode(call.get("function")).decode()


def read_tokenizer(path: str) -> TokenCounter:
    """A counter by a `tokenizer.json`. Raises ConfigError naming what is missing."""
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            "`tokenizers` needs a package that is not installed: pip install 'weighbridge[tokenizer]'",
            path="$.tokenizers",
        ) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises bare exceptions
        raise ConfigError(f"{path} is not a tokenizer.json: {error}", path="$.tokenizers") from None
    return TokenCounter(lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids))
