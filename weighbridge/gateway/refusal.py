"""The one place where outcomes become HTTP: status, message, code and retry headers of everything we refuse."""

from __future__ import annotations

import math
import random

from weighbridge.core.errors import RequestError
from weighbridge.http import Responder

_MESSAGES = {
    "no_instance": "No instance is available for this model right now.",
    "queue_full": "Too many requests are waiting; try again later.",
    "cannot_meet_slo": "The fleet is too busy to answer in time; try again later.",
    "attempts_exhausted": "Every engine that was tried failed to answer.",
    "queue_timeout": "The request waited too long for a free engine.",
    "retry_budget": "The engines are failing; try again later.",
    "gateway_busy": "The gateway is overloaded; try again shortly.",
    "draining": "The gateway is shutting down.",
    "internal_error": "The server failed to answer this request.",
    "no_router": "The gateway's router is being restarted; try again shortly.",
}
_CODES = {429: "rate_limit_exceeded", 502: "upstream_error", 503: "no_capacity", 504: "upstream_timeout"}
# How far a client's wait is spread, so that refused clients do not return all at once.
SPREAD = 0.25


def retry_headers(retry_after_s: float | None, rng: random.Random) -> list[tuple[str, str]]:
    """`retry-after` in whole seconds, at least 1, and `retry-after-ms`."""
    if retry_after_s is None:
        return []
    wait_s = max(retry_after_s, 0.05) * (1.0 + SPREAD * rng.random())
    return [("retry-after", str(max(1, math.ceil(wait_s)))), ("retry-after-ms", str(max(1, round(wait_s * 1000))))]


def send_reject(
    responder: Responder,
    status: int,
    reason: str,
    retry_after_s: float | None,
    rng: random.Random,
    headers: list[tuple[str, str]],
) -> None:
    """Answers a request that the router rejected. 429: contended; 503: no capacity; 502: every attempt failed."""
    if retry_after_s is None and status in (429, 503):
        retry_after_s = 1.0
    extra = [*headers, ("x-weighbridge-reason", reason), *retry_headers(retry_after_s, rng)]
    message = _MESSAGES.get(reason, "The request cannot be served right now.")
    responder.send_error(status, message, code=_CODES.get(status, reason), headers=extra)


def send_request_error(responder: Responder, error: RequestError, headers: list[tuple[str, str]]) -> None:
    """Answers a request that is wrong in itself."""
    extra = [*headers]
    if error.retry_after_s is not None:
        extra.append(("retry-after", str(max(1, math.ceil(error.retry_after_s)))))
        extra.append(("retry-after-ms", str(max(1, round(error.retry_after_s * 1000)))))
    responder.send_error(
        error.status, error.message, kind=error.type, param=error.param, code=error.code, headers=extra
    )
