"""Usage objects as engines write them, and as the gateway keeps them."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """What an engine counted; None where it does not tell."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class CacheDetails(msgspec.Struct):
    """How much of a prompt was cached."""

    cached_tokens: int | None = None


class UsageFields(msgspec.Struct):
    """A usage object in OpenAI's or Anthropic's spelling."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: CacheDetails | None = None
    input_tokens_details: CacheDetails | None = None


class ReplyFields(msgspec.Struct):
    """What is read of a whole reply."""

    usage: UsageFields | None = None
