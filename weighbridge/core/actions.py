"""What the router asks its driver to do: the only outputs of `Router.handle`."""

from __future__ import annotations

from typing import Literal

import msgspec

from weighbridge.core.decision import Decision


class _Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    pass


class Dispatch(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="dispatch"):
    """Send the request to `instance`. With `prefill_instance` the prompt runs there first and `instance` decodes.

    `attempt` counts from 1. `max_tokens` is set only when the router clipped the budget. `priority` is the
    engine's own priority number (lower first), set where the instance takes one.
    """

    request_id: str
    instance: str
    attempt: int = 1
    prefill_instance: str | None = None
    max_tokens: int | None = None
    priority: int | None = None
    decision: Decision | None = None


class Hold(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="hold"):
    """The request waits in the router's queue."""

    request_id: str


class Reject(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="reject"):
    """Answer the client with an error; the request has ended.

    429: capacity exists but is contended. 503: no capacity. 502: every allowed attempt failed.
    `reason` is machine-readable (`queue_full`, `cannot_meet_slo`, `no_instance`, `attempts_exhausted`, ...).
    """

    request_id: str
    status: int
    reason: str
    retry_after_s: float | None = None


class Preempt(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="preempt"):
    """Ask the engine to pause a running request by saving its KV (`swap`) or dropping it (`recompute`)."""

    request_id: str
    instance: str
    mode: Literal["swap", "recompute"]


class Abort(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """Stop the running attempt; the driver answers with `RequestFailed` or `RequestCancelled`."""

    request_id: str
    instance: str
    reason: str


Action = Dispatch | Hold | Reject | Preempt | Abort
