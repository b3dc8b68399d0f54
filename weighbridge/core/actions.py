"""What the router asks its driver to do: the only outputs of `Router.handle`."""

from __future__ import annotations

from typing import Literal

import msgspec

from weighbridge.core.decision import Decision

Leg = Literal["whole", "prefill", "decode", "both"]


class _Action(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", gc=False):
    pass


class Dispatch(_Action, frozen=True, kw_only=True, omit_defaults=True, tag="dispatch"):
    """Send the request, or one leg of it, to `instance`.

    `leg` says which part: `whole` (the usual case), `prefill` (only the prompt; answered with `PrefillFinished`, after
    which a second dispatch of the same attempt follows), `decode` (the KV waits on `prefill_instance`; generate on
    `instance`), or `both` (engines that pair the two at once: prompt on `prefill_instance`, generation on `instance`,
    sent together). `attempt` counts from 1. `max_tokens` is set only when the router clipped the budget; as in the
    request it is that of all choices together. `priority` is a number for the engine's own priority field (lower
    first), set where the instance takes one.
    """

    request_id: str
    instance: str
    attempt: int = 1
    leg: Leg = "whole"
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
