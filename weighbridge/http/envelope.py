"""The OpenAI error envelope, and which `type` goes with which status when the caller names none."""

import msgspec

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}

_CONTROL = dict.fromkeys((*range(32), 127))


def error_object(
    status: int, message: str, *, kind: str | None = None, param: str | None = None, code: str | None = None
) -> dict[str, dict[str, str | None]]:
    """`{"error": {...}}` with the four fields every OpenAI client reads; control characters are dropped."""
    if kind is None:
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    message = message.translate(_CONTROL)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_body(
    status: int, message: str, *, kind: str | None = None, param: str | None = None, code: str | None = None
) -> bytes:
    """The envelope as JSON bytes."""
    return msgspec.json.encode(error_object(status, message, kind=kind, param=param, code=code))
