"""The router: events in, actions out.

`handle` is synchronous, does no I/O and reads no clock; two routers with equal settings that are fed equal events at
equal times answer with equal actions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec

from weighbridge.core.actions import Abort, Action, Dispatch, Reject
from weighbridge.core.decision import Candidate, Decision
from weighbridge.core.events import (
    Event,
    FirstToken,
    InstanceDown,
    InstanceReported,
    InstanceUp,
    PrefillFinished,
    ProfileUpdated,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
    Tick,
    TokensProgressed,
)
from weighbridge.core.request import DEFAULT_TIERS, Request, Tier
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.policies.registry import make_policy
from weighbridge.routing.policy import Choice, Option, View


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a router's behaviour depends on besides its events; the event log's header keeps it."""

    policy: str = "least_tokens"
    policy_options: dict[str, Any] = {}
    seed: int = 0
    max_attempts: int = 3
    record_decisions: bool = True
    tiers: tuple[Tier, ...] = DEFAULT_TIERS


class Router:
    """Decides for every request where it runs. One instance per fleet; not thread-safe and need not be."""

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self.fleet = Fleet()
        self.policy = make_policy(self.settings.policy, self.settings.policy_options)
        self.rng = random.Random(self.settings.seed)
        self._attempts: dict[str, _Attempts] = {}
        self._handlers: dict[type, Callable[[Any, float], list[Action]]] = {
            RequestArrived: self._arrived,
            RequestDispatched: _nothing,
            FirstToken: self._first_token,
            TokensProgressed: self._progressed,
            PrefillFinished: _nothing,
            RequestFinished: self._ended,
            RequestFailed: self._failed,
            RequestCancelled: self._ended,
            InstanceReported: self._reported,
            InstanceUp: self._up,
            InstanceDown: self._down,
            ProfileUpdated: self._profile,
            Tick: _nothing,
        }

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event at `now_s` (seconds, never decreasing) and say what the driver must do."""
        return self._handlers[type(event)](event, now_s)

    @property
    def live_requests(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._attempts)

    def _arrived(self, event: RequestArrived, now_s: float) -> list[Action]:
        request = event.request
        if request.id in self._attempts:
            raise ValueError(f"request id {request.id} is live already")
        self._attempts[request.id] = _Attempts(request)
        return self._place(request, now_s)

    def _place(self, request: Request, now_s: float) -> list[Action]:
        """Choose an instance for a request that runs nowhere, or reject it."""
        attempts = self._attempts[request.id]
        options, excluded = self._options(request, attempts.failed_on)
        if not options and attempts.failed_on:
            # every other instance is out as well: a second try on one that failed beats none
            options, excluded = self._options(request, frozenset())
        if not options:
            del self._attempts[request.id]
            return [Reject(request_id=request.id, status=503, reason="no_instance", retry_after_s=1.0)]
        view = View(request, options, self.fleet, now_s, self.rng, self.settings.record_decisions)
        choice = self.policy.choose(view)
        option = options[choice.index]
        attempts.count += 1
        self.fleet.charge(
            request,
            option.instance,
            cached_tokens=option.cached_tokens,
            expected_output_tokens=option.decode_tokens,
            now_s=now_s,
        )
        decision = None
        if self.settings.record_decisions:
            decision = self._decision(view, choice, excluded, attempts.count)
        return [
            Dispatch(request_id=request.id, instance=option.instance.name, attempt=attempts.count, decision=decision)
        ]

    def _options(self, request: Request, failed_on: frozenset[str]) -> tuple[list[Option], list[Candidate]]:
        options: list[Option] = []
        excluded: list[Candidate] = []
        record = self.settings.record_decisions
        for instance in self.fleet:
            reason = _why_not(request, instance, failed_on)
            if reason is None:
                cached = 0
                if request.prefix_hashes:
                    blocks = instance.prefix.match(request.prefix_hashes)
                    # the last prompt token is always computed: its logits give the first output token
                    cached = min(blocks * request.prefix_block_tokens, request.prompt_tokens - 1)
                options.append(
                    Option(
                        instance,
                        cached_tokens=cached,
                        prefill_tokens=request.prompt_tokens - cached,
                        decode_tokens=request.max_tokens,
                    )
                )
            elif record:
                excluded.append(Candidate(instance=instance.name, excluded=reason))
        return options, excluded

    def _decision(self, view: View, choice: Choice, excluded: list[Candidate], attempt: int) -> Decision:
        candidates = [
            Candidate(
                instance=option.instance.name,
                cached_tokens=option.cached_tokens,
                prefill_tokens=option.instance.prefill_tokens + option.prefill_tokens,
                decode_tokens=option.instance.decode_tokens + option.decode_tokens,
                terms=dict(choice.terms[index]) if choice.terms else {},
                score=choice.scores[index] if choice.scores else None,
            )
            for index, option in enumerate(view.options)
        ]
        chosen = view.options[choice.index]
        return Decision(
            request_id=view.request.id,
            at_s=view.now_s,
            policy=self.settings.policy,
            chosen=chosen.instance.name,
            candidates=(*candidates, *excluded),
            attempt=attempt,
            expected_output_tokens=chosen.decode_tokens,
            note=choice.note,
        )

    def _first_token(self, event: FirstToken, now_s: float) -> list[Action]:
        self.fleet.first_token(event.request_id, now_s)
        return []

    def _progressed(self, event: TokensProgressed, now_s: float) -> list[Action]:
        self.fleet.progress(event.request_id, event.output_tokens)
        return []

    def _ended(self, event: RequestFinished | RequestCancelled, now_s: float) -> list[Action]:
        self.fleet.release(event.request_id)
        self._attempts.pop(event.request_id, None)
        return []

    def _failed(self, event: RequestFailed, now_s: float) -> list[Action]:
        attempts = self._attempts.get(event.request_id)
        if attempts is None:
            return []
        self.fleet.release(event.request_id)
        attempts.failed_on |= {event.instance}
        if not event.retriable:
            del self._attempts[event.request_id]
            return []
        if attempts.count >= self.settings.max_attempts:
            del self._attempts[event.request_id]
            return [Reject(request_id=event.request_id, status=502, reason="attempts_exhausted")]
        return self._place(attempts.request, now_s)

    def _reported(self, event: InstanceReported, now_s: float) -> list[Action]:
        instance = self.fleet.instances.get(event.instance)
        if instance is not None and instance.generation == event.generation and event.sampled_s > instance.report_s:
            instance.report, instance.report_s = event.report, event.sampled_s
        return []

    def _up(self, event: InstanceUp, now_s: float) -> list[Action]:
        self.fleet.up(event.spec, event.generation)
        return []

    def _down(self, event: InstanceDown, now_s: float) -> list[Action]:
        instance = self.fleet.down(event.instance, drain=event.drain)
        if instance is None or event.drain:
            return []
        return [
            Abort(request_id=request_id, instance=instance.name, reason=event.reason) for request_id in instance.charges
        ]

    def _profile(self, event: ProfileUpdated, now_s: float) -> list[Action]:
        instance = self.fleet.instances.get(event.instance)
        if instance is not None:
            instance.spec = msgspec.structs.replace(
                instance.spec, rates=event.rates, step=event.step, error=event.error
            )
        return []


class _Attempts:
    __slots__ = ("count", "failed_on", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.count = 0
        self.failed_on: frozenset[str] = frozenset()


def _why_not(request: Request, instance: Instance, failed_on: frozenset[str]) -> str | None:
    """Reason an instance cannot take a request, or None."""
    spec = instance.spec
    if not instance.up:
        return "draining" if instance.draining else "down"
    if spec.role != "mixed":
        return f"role {spec.role}"
    if request.model and spec.models and request.model not in spec.models:
        return "serves another model"
    limit = spec.limits.max_context
    if limit is not None and request.prompt_tokens > limit:
        return f"prompt exceeds its context of {limit} tokens"
    if instance.name in failed_on:
        return "failed on it before"
    return None


def _nothing(event: Event, now_s: float) -> list[Action]:
    return []
