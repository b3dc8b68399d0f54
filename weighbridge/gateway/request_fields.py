"""The fields of a request body that the gateway reads; all others pass unseen."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class RequestFields(msgspec.Struct):
    """Typed where a value decides something; the rest is kept as its bytes.

    The first `COMMON` fields are the usual ones. Most bodies set none of the others and are then done with sooner.
    """

    model: str | UnsetType | None = UNSET
    messages: msgspec.Raw | UnsetType = UNSET
    prompt: msgspec.Raw | UnsetType = UNSET
    input: msgspec.Raw | UnsetType = UNSET
    stream: bool | UnsetType | None = UNSET
    stream_options: dict[str, Any] | UnsetType | None = UNSET
    max_tokens: int | float | UnsetType | None = UNSET
    max_completion_tokens: int | float | UnsetType | None = UNSET
    max_output_tokens: int | float | UnsetType | None = UNSET
    n: int | float | UnsetType | None = UNSET
    best_of: int | float | UnsetType | None = UNSET
    stop: str | list[str] | UnsetType | None = UNSET
    stop_sequences: list[str] | UnsetType | None = UNSET
    service_tier: str | UnsetType | None = UNSET
    tools: msgspec.Raw | UnsetType = UNSET
    system: msgspec.Raw | UnsetType = UNSET
    instructions: msgspec.Raw | UnsetType = UNSET
    priority: msgspec.Raw | UnsetType = UNSET
    cache_salt: msgspec.Raw | UnsetType = UNSET
    kv_transfer_params: msgspec.Raw | UnsetType = UNSET
    bootstrap_host: msgspec.Raw | UnsetType = UNSET
    bootstrap_port: msgspec.Raw | UnsetType = UNSET
    bootstrap_room: msgspec.Raw | UnsetType = UNSET


COMMON = RequestFields.__struct_fields__.index("max_output_tokens")
