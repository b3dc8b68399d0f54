"""What an engine counted, read from its usage object."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from weighbridge.gateway.usage_fields import ReplyFields, Usage, UsageFields

NONE_TOLD: Final = Usage()
_decode_body: Final = msgspec.json.Decoder(ReplyFields).decode


def usage_of(value: Any) -> Usage:
    """A usage object, in OpenAI's or Anthropic's spelling; anything odd counts as not told."""
    try:
        return _usage(msgspec.convert(value, UsageFields | None))
    except msgspec.ValidationError:
        return NONE_TOLD


def usage_of_body(body: bytes) -> Usage:
    """The usage object of a whole reply."""
    try:
        return _usage(_decode_body(body).usage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return NONE_TOLD


def _usage(usage: UsageFields | None) -> Usage:
    if usage is None:
        return NONE_TOLD
    details = usage.prompt_tokens_details or usage.input_tokens_details
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    output = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    return Usage(_count(prompt), _count(output), _count(details.cached_tokens) if details else None)


def _count(value: int | None) -> int | None:
    return value if value is not None and value >= 0 else None
