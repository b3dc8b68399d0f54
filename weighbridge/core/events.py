"""What happens to the router: the only inputs of `Router.handle`.

Every way a request can end is an event here. An event holds what a real gateway can know at that moment, and no more.
"""

from __future__ import annotations

import msgspec

from weighbridge.core.instance import InstanceSpec, LoadReport, Rates, StepTerms
from weighbridge.core.request import Request


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", gc=False):
    pass


class RequestArrived(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="arrived"):
    """A request came in and was validated."""

    request: Request


class RequestAdopted(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="adopted"):
    """A request that an earlier router had taken in and that goes on under this one.

    It runs on `instance` as attempt `attempt` and has `output_tokens` so far; with an empty `instance` it runs nowhere
    and only its end follows. It is never placed by this event.
    """

    request: Request
    instance: str = ""
    attempt: int = 1
    output_tokens: int = 0


class RequestDispatched(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="dispatched"):
    """The request was written to its instance."""

    request_id: str


class FirstToken(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="first_token"):
    """The first generated token of any kind (content, reasoning or tool call) arrived."""

    request_id: str


class TokensProgressed(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="progressed"):
    """`output_tokens` have been generated so far; sent at most every 0.25 s per request."""

    request_id: str
    output_tokens: int


class PrefillFinished(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="prefill_finished"):
    """The prefill leg of a disaggregated request ended; its KV waits on the prefill instance under a lease."""

    request_id: str
    cached_tokens: int | None = None


class RequestFinished(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="finished"):
    """The request ended well. Token counts come from the engine's usage where it tells."""

    request_id: str
    output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class RequestFailed(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """The attempt on `instance` failed. `retriable`: nothing reached the client and the fault is the engine's."""

    request_id: str
    instance: str
    reason: str
    retriable: bool = False


class RequestCancelled(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="cancelled"):
    """The client went away, or a deadline of its own passed."""

    request_id: str
    reason: str = "client"


class InstanceReported(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="reported"):
    """An engine's load report, sampled at `sampled_s` on the router's clock."""

    instance: str
    generation: int
    sampled_s: float
    report: LoadReport


class InstanceUp(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="up"):
    """An instance joined or came back. A restart has a new `generation` (its KV cache is empty)."""

    spec: InstanceSpec
    generation: int


class InstanceDown(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="down"):
    """An instance is out. `drain` lets its running requests finish; otherwise they are aborted."""

    instance: str
    reason: str
    drain: bool = False


class InstanceGone(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="gone"):
    """An instance was taken out of the fleet for good. It is forgotten as soon as nothing is charged to it any more;
    one that comes up under its name is another."""

    instance: str


class BlocksStored(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="blocks_stored"):
    """An engine's KV event: it holds these prefix blocks now. Hashes are the router's own, as in `Request`."""

    instance: str
    generation: int
    hashes: tuple[int, ...]


class BlocksRemoved(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="blocks_removed"):
    """An engine's KV event: it holds these prefix blocks no more; `all`: it holds none."""

    instance: str
    generation: int
    hashes: tuple[int, ...] = ()
    all: bool = False


class ProfileUpdated(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="profile"):
    """Calibration learned new constants. None in all three moves the instance to the next degradation level."""

    instance: str
    rates: Rates | None = None
    step: StepTerms | None = None
    error: float | None = None


class Tick(_Event, frozen=True, kw_only=True, omit_defaults=True, tag="tick"):
    """Time passed; sent every 50 ms by a driver whose router asks for it."""


Event = (
    RequestArrived
    | RequestAdopted
    | RequestDispatched
    | FirstToken
    | TokensProgressed
    | PrefillFinished
    | RequestFinished
    | RequestFailed
    | RequestCancelled
    | InstanceReported
    | InstanceUp
    | InstanceDown
    | InstanceGone
    | BlocksStored
    | BlocksRemoved
    | ProfileUpdated
    | Tick
)
