"""A finished request's prompt, and how an engine is asked for its tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from weighbridge.gateway.flight import Flight

MAX_BODY_BYTES = 1 << 20
CHAT_FIELDS = (
    *("messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt"),
    *("continue_final_message", "documents", "add_special_tokens"),
)
PROMPT_FIELDS = ("prompt", "add_special_tokens")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`names` are the Router's hashes of its leading byte blocks; `tokens` is the engine's count, or an estimate."""

    names: tuple[int, ...]
    text_bytes: int
    endpoint: str
    body: bytes
    salt: bytes | None
    tokens: int
    cached_tokens: int | None


def prompt_of(flight: Flight, prompt_tokens: int | None, cached_tokens: int | None) -> Prompt | None:
    """None where nothing can be learned: no whole block, several prompts, media, or a very large body."""
    request, routed = flight.client_request, flight.routed
    if not routed.prefix_hashes or request.media or request.n > 1 or len(request.body) > MAX_BODY_BYTES:
        return None
    if request.endpoint not in ("chat", "completions"):
        return None
    return Prompt(
        routed.prefix_hashes,
        len(request.text),
        request.endpoint,
        request.body,
        flight.salt,
        prompt_tokens or routed.prompt_tokens,
        cached_tokens,
    )


def salt_of(prompt: Prompt, body: dict[str, Any]) -> str:
    """The cache salt that the engine saw: the gateway's own, else the client's."""
    if prompt.salt is not None:
        return str(msgspec.json.decode(prompt.salt))
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) else ""


def token_ids(body: dict[str, Any]) -> list[int] | None:
    """The prompt's tokens where the client sent them."""
    ids = body.get("prompt")
    if isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
        ids = ids[0]
    return ids if isinstance(ids, list) and ids and all(type(token) is int for token in ids) else None


def tokenize_body(prompt: Prompt, body: dict[str, Any], model: str) -> bytes | None:
    """What to POST to `/tokenize`; None where the prompt's form has no such question."""
    fields = CHAT_FIELDS if prompt.endpoint == "chat" else PROMPT_FIELDS
    asked = {name: body[name] for name in fields if name in body}
    if prompt.endpoint == "completions" and not isinstance(asked.get("prompt"), str):
        whole = asked.get("prompt")
        if not (isinstance(whole, list) and len(whole) == 1 and isinstance(whole[0], str)):
            return None
        asked["prompt"] = whole[0]
    return msgspec.json.encode({"model": model, **asked})
