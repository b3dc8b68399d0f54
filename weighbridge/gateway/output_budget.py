"""The output budget in a body: under which name each endpoint takes it, and how it is made smaller. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weighbridge.gateway.splice import add_value, replace_value, top_level

if TYPE_CHECKING:
    from weighbridge.gateway.client_request import ClientRequest

LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_FIELD = {
    "chat": "max_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
}


def budget_field(request: ClientRequest) -> str | None:
    """What the endpoint calls the budget, in the client's own choice of words; None where nothing is generated."""
    field = _FIELD.get(request.endpoint)
    if field is not None and request.uses_completion_limit and request.endpoint == "chat":
        return "max_completion_tokens"
    return field


def clip_budget(body: bytes, request: ClientRequest, tokens: int) -> bytes:
    """`body` with its budget cut down to `tokens` for all its choices together; engines count each for itself.

    At least one token is left, and nothing that the client wrote grows.
    """
    own = budget_field(request)
    if own is None:
        return body
    most = min(max(1, tokens // request.n), request.max_tokens)
    written = {name: msgspec.json.decode(body[start:end]) for name, start, end in top_level(body) if name in LIMITS}
    for name, value in written.items():
        if value > most if value is not None else name == own:
            body = replace_value(body, name, b"%d" % most)
    return body if own in written else add_value(body, own, b"%d" % most)
