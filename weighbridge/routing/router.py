"""The router: events in, actions out.

`handle` is synchronous, does no I/O and reads no clock; two routers with equal settings that are fed equal events at
equal times answer with equal actions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from weighbridge.core.actions import Abort, Action, Hold, Reject
from weighbridge.core.events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    FirstToken,
    InstanceDown,
    InstanceGone,
    InstanceReported,
    InstanceUp,
    PrefillFinished,
    ProfileUpdated,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    Tick,
    TokensProgressed,
)
from weighbridge.core.request import DEFAULT_TIERS, Request, Tier
from weighbridge.routing.admission import Admission
from weighbridge.routing.correction import Correction
from weighbridge.routing.cost import cost_of
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.live import HANDING_OFF, HELD, RUNNING, Live
from weighbridge.routing.loads import Stability
from weighbridge.routing.outlook import Outlook, outlook
from weighbridge.routing.placing import Placing
from weighbridge.routing.policies.registry import make_policy
from weighbridge.routing.policy import Policy
from weighbridge.routing.pump import Pump
from weighbridge.routing.settings import RouterSettings, check_bounds
from weighbridge.routing.stability import Offer
from weighbridge.routing.told import Told

__all__ = ["Router", "RouterSettings"]


class Router:
    """Decides for every request where it runs, and when. One instance per fleet; not thread-safe and need not be.
    Raises ConfigError or PolicyError where the settings cannot be used."""

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        check_bounds(self.settings)
        self.fleet = Fleet()
        policy = make_policy(self.settings.policy, self.settings.policy_options)
        self._placing = Placing(self.settings, self.fleet, policy, random.Random(self.settings.seed))
        self.holds = self._placing.holds
        self.tiers: dict[str, Tier] = {tier.name: tier for tier in self.settings.tiers}
        self._default_tier = self.tiers.get("standard") or (
            self.settings.tiers[0] if self.settings.tiers else DEFAULT_TIERS[1]
        )
        self._correction = Correction()
        self._offer = Offer()
        self._live: dict[str, Live] = {}
        self.admission = Admission(self.settings)
        self._placing.on_start = self._started
        self._pump = Pump(self.settings, self._placing, self.admission, self._reject)
        told = Told(self.fleet)
        self._handlers: dict[type, Callable[[Any, float], list[Action]]] = {
            RequestArrived: self._arrived,
            RequestAdopted: self._adopted,
            RequestDispatched: _nothing,
            FirstToken: self._first_token,
            TokensProgressed: self._progressed,
            PrefillFinished: self._prefill_finished,
            RequestFinished: self._finished,
            RequestFailed: self._failed,
            RequestCancelled: self._cancelled,
            InstanceReported: told.reported,
            InstanceUp: self._up,
            InstanceDown: self._down,
            InstanceGone: self._gone,
            BlocksStored: told.blocks_stored,
            BlocksRemoved: told.blocks_removed,
            ProfileUpdated: self._profile,
            Tick: self._tick,
        }

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event at `now_s` (seconds, never decreasing) and say what the driver must do."""
        return self._handlers[type(event)](event, now_s)

    @property
    def policy(self) -> Policy:
        """The policy that chooses; may be replaced between events."""
        return self._placing.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self._placing.policy = policy

    @property
    def live_requests(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._live)

    def outlook(self, request: Request, now_s: float) -> Outlook:
        """What `request.model`'s pool would cost this request in time; asking changes nothing."""
        pool, tier = self._placing.candidates.pool(request.model), self.tiers.get(request.tier, self._default_tier)
        return outlook(pool, self.fleet, self._pump.held(request.model), request, tier, now_s)

    def stability(self, now_s: float) -> Stability:
        """What is offered against what the instances that are up can sustain."""
        return self._offer.stability([instance for instance in self.fleet if instance.up], now_s)

    @property
    def held_requests(self) -> int:
        """Requests that wait here: for a first instance, or between their legs for a decode instance."""
        return len(self._pump)

    @property
    def shadow_failures(self) -> dict[str, int]:
        """How often each shadow policy raised, or broke the policy contract, instead of answering."""
        return self._placing.shadows.failures

    @property
    def wants_tick(self) -> bool:
        """Whether the driver must send `Tick` every 50 ms: something waits here."""
        return self.holds and bool(self._pump)

    # ---- requests

    def _arrived(self, event: RequestArrived, now_s: float) -> list[Action]:
        request = event.request
        if request.id in self._live:
            raise ValueError(f"request id {request.id} is live already")
        tier = self.tiers.get(request.tier, self._default_tier)
        live = self._begin(request, tier)
        if request.prefix_hashes:
            best = 0
            for tokens in self._placing.candidates.cached(request).values():
                if tokens > best:
                    best = tokens
            live.prefill_tokens = max(request.prompt_tokens - best, 1)
        self.fleet.offered.add(live.prefill_tokens, now_s)
        self._offer.add(request, live.prefill_tokens, live.expected_output_tokens, now_s)
        refusal = self.admission.enter(live, now_s)
        if refusal is not None:
            del self._live[request.id]
            self.admission.count(tier.name, refusal.reason)
            wait_s = refusal.retry_after_s or self._pump.drain_s(request)
            return [Reject(request_id=request.id, status=refusal.status, reason=refusal.reason, retry_after_s=wait_s)]
        return self._enter(live, now_s)

    def _begin(self, request: Request, tier: Tier) -> Live:
        """A request enters the books, with an estimate of its output."""
        live = self._live[request.id] = Live(request, tier, self.settings.default_ttft_s)
        lengths = self._placing.lengths
        live.lengths = lengths.table(request)
        live.length_scale = lengths.draw_scale()
        live.expected_output_tokens = lengths.expected(request, live.lengths, 0, live.length_scale)
        live.cost_tokens = request.prompt_tokens + live.expected_output_tokens
        return live

    def _adopted(self, event: RequestAdopted, now_s: float) -> list[Action]:
        """Charge what runs already. Its tenant's and tier's bounds were passed once and are not asked again."""
        request = event.request
        if request.id in self._live:
            raise ValueError(f"request id {request.id} is live already")
        tier = self.tiers.get(request.tier, self._default_tier)
        live = self._begin(request, tier)
        live.attempts = event.attempt
        self.admission.adopt(live)
        instance = self.fleet.instances.get(event.instance)
        if instance is None:
            return []
        expected = live.expected_output_tokens
        self._started(live)
        charge = self.fleet.charge(
            request,
            instance,
            cached_tokens=0,
            expected_output_tokens=max(expected, 1),
            now_s=now_s,
            prefill=instance.spec.role != "decode",
            tier=tier,
        )
        charge.found_no_queue = False  # when it was sent nobody here was looking
        if event.output_tokens:
            self.fleet.first_token(request.id, now_s, self._remaining(live, 1))
            self.fleet.progress(request.id, event.output_tokens, self._remaining(live, event.output_tokens))
        return []

    def _enter(self, live: Live, now_s: float) -> list[Action]:
        """Place a request that runs nowhere, hold it, or reject it."""
        pool = self._placing.candidates.pool(live.model)
        if pool.alone and 0 < live.attempts == self.settings.max_attempts - 1:
            # the last try: it depends on one engine, not on two and what is between them, and has waited enough
            live.held_s = now_s
            usable = self._placing.candidates.usable(live.request, pool, pool.alone, live.failed_on)
            sent = self._placing.start(live, pool, usable, now_s, may_hold=False)
            return [sent] if sent else []
        usable = self._placing.candidates.usable(live.request, pool, pool.entry, live.failed_on)
        if not usable:
            return [self._reject(live, 503, "no_instance", 1.0)]
        if not self.holds:
            sent = self._placing.start(live, pool, usable, now_s, may_hold=False)
            return [sent] if sent else []
        actions = self._pump.arrive(live, now_s)
        if live.stage == HELD and live.id in self._live:
            actions.insert(0, Hold(request_id=live.id))
        return actions

    def _first_token(self, event: FirstToken, now_s: float) -> list[Action]:
        live = self._live.get(event.request_id)
        if live is None:
            return []
        charge = self.fleet.charges.get(event.request_id)
        if charge is not None and self.settings.correct and charge.live and charge.prefill_left:
            self._correction.first_token(charge, charge.prefill_left, now_s)
        self.fleet.first_token(event.request_id, now_s, self._remaining(live, 1))
        if charge is not None and self.settings.correct and charge.live:
            self._correction.progressed(charge, now_s)
        return self._moved(now_s)

    def _progressed(self, event: TokensProgressed, now_s: float) -> list[Action]:
        live = self._live.get(event.request_id)
        if live is not None:
            self.fleet.progress(event.request_id, event.output_tokens, self._remaining(live, event.output_tokens))
            if self.settings.correct:
                charge = self.fleet.charges.get(event.request_id)
                if charge is not None and charge.live:
                    self._correction.progressed(charge, now_s)
        return []

    def _remaining(self, live: Live, generated: int) -> int:
        lengths = self._placing.lengths
        return max(lengths.expected(live.request, live.lengths, generated, live.length_scale) - generated, 0)

    def _prefill_finished(self, event: PrefillFinished, now_s: float) -> list[Action]:
        live = self._live.get(event.request_id)
        if live is None or event.request_id not in self.fleet.charges:
            return []
        charge = self.fleet.charges[event.request_id]
        if self.settings.correct and charge.live and charge.prefill_left:
            self._correction.first_token(charge, charge.prefill_left, now_s)
        self.fleet.prefilled(event.request_id, now_s)
        if live.id in self.fleet.sources or charge.instance.spec.role != "prefill":
            return self._moved(now_s)  # its decode leg runs already, perhaps since before this reply was read
        self.fleet.hand_off(event.request_id)
        pool = self._placing.candidates.pool(live.model)
        usable = self._placing.candidates.usable(live.request, pool, pool.decode, live.failed_on)
        if not usable:
            return [self._reject(live, 503, "no_instance", 1.0)]
        if not self.holds:
            sent = self._placing.start_decode(live, usable, now_s, may_hold=False)
            return [sent] if sent else []
        self._pump.hand_off(live, now_s)
        actions = self._pump.run(now_s)
        if live.stage == HANDING_OFF and live.id in self._live:
            actions.insert(0, Hold(request_id=live.id))
        return actions

    def _finished(self, event: RequestFinished, now_s: float) -> list[Action]:
        live = self._live.get(event.request_id)
        if live is not None:
            self._placing.lengths.observe(live.request, event.output_tokens)
            charge = self.fleet.sources.get(event.request_id) or self.fleet.charges.get(event.request_id)
            if event.cached_tokens is not None and charge is not None:
                self.fleet.prefix_credit.observe(live.prompt_tokens, charge.cached_tokens, event.cached_tokens)
        return self._ended(event.request_id, now_s)

    def _cancelled(self, event: RequestCancelled, now_s: float) -> list[Action]:
        return self._ended(event.request_id, now_s)

    def _ended(self, request_id: str, now_s: float) -> list[Action]:
        self._forget(request_id)
        return self._moved(now_s)

    def _failed(self, event: RequestFailed, now_s: float) -> list[Action]:
        live = self._live.get(event.request_id)
        if live is None:
            return []
        self._stop(live)
        live.failed_on |= {event.instance}
        if not event.retriable:
            return self._ended(event.request_id, now_s)
        if live.attempts >= self.settings.max_attempts:
            return [self._reject(live, 502, "attempts_exhausted", None), *self._moved(now_s)]
        return self._enter(live, now_s)

    def _reject(self, live: Live, status: int, reason: str, retry_after_s: float | None = None) -> Reject:
        self.admission.count(live.tier_name, reason)
        self._forget(live.id)
        return Reject(request_id=live.id, status=status, reason=reason, retry_after_s=retry_after_s)

    def _started(self, live: Live) -> None:
        self.admission.run(live)
        self.admission.served(live, live.prompt_tokens, live.expected_output_tokens)

    def _stop(self, live: Live) -> None:
        """End whatever a request has here: its place in a queue, or its charges."""
        if live.stage != RUNNING:
            self._pump.drop(live)
        charge = self.fleet.release(live.id)
        if charge is not None:
            # what was served beyond or below the expectation is settled now
            self.admission.served(live, 0, charge.output_tokens - live.expected_output_tokens)
            self.admission.run(live, -1)
        if self.fleet.leaving:
            self._sweep()

    def _forget(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._stop(live)
            self.admission.leave(live)

    def _tick(self, event: Tick, now_s: float) -> list[Action]:
        return self._moved(now_s)

    def _moved(self, now_s: float) -> list[Action]:
        """Something changed: perhaps a held request can go."""
        return self._pump.run(now_s) if self.holds and self._pump else []

    # ---- instances

    def _up(self, event: InstanceUp, now_s: float) -> list[Action]:
        instance = self.fleet.up(event.spec, event.generation)
        if self.settings.correct:
            self._correction.forget(instance)
        self._placing.candidates.fleet_changed()
        return self._moved(now_s)

    def _down(self, event: InstanceDown, now_s: float) -> list[Action]:
        instance = self.fleet.down(event.instance, drain=event.drain)
        if instance is None:
            return []
        self._placing.candidates.fleet_changed()
        actions: list[Action] = []
        if not event.drain:
            lost = [request_id for request_id in instance.charges if self._needs(request_id, instance)]
            for request_id in lost:
                self._pump.drop(self._live[request_id])
                actions.append(Abort(request_id=request_id, instance=instance.name, reason=event.reason))
        return [*actions, *self._moved(now_s)]

    def _needs(self, request_id: str, instance: Instance) -> bool:
        """Whether the request cannot go on without the instance: it runs there, or its prompt's KV is only there."""
        charge = self.fleet.charges.get(request_id)
        if charge is None or charge.instance is instance:
            return True
        source = self.fleet.sources.get(request_id)
        return source is not None and source.prefill_left > 0

    def _gone(self, event: InstanceGone, now_s: float) -> list[Action]:
        if not self.fleet.gone(event.instance):
            return []
        self._placing.candidates.fleet_changed()
        self._sweep()
        return self._moved(now_s)

    def _sweep(self) -> None:
        """Forget the instances that are gone and hold no charges."""
        for instance in self.fleet.sweep():
            self._correction.gone(instance)
            self._placing.candidates.fleet_changed()

    def _profile(self, event: ProfileUpdated, now_s: float) -> list[Action]:
        instance = self.fleet.instances.get(event.instance)
        if instance is not None:
            instance.spec = msgspec.structs.replace(
                instance.spec, rates=event.rates, step=event.step, error=event.error
            )
            seen = instance.cost is not None and instance.cost.seen
            instance.cost = cost_of(instance.spec)
            if self.settings.correct:
                self._correction.forget(instance)
                if instance.cost is not None:
                    instance.cost.seen = seen
            self._placing.candidates.fleet_changed()
        return []


def _nothing(event: Event, now_s: float) -> list[Action]:
    return []
