"""Watch the router's events for clean observations of instances, and tell it when their cost models have moved.

A driver calls `observe` after each `Router.handle` and feeds the router what comes back. Clean are: the first token
of a request that was alone on its instance from dispatch on, and tokens between two reports of a request while its
instance's batch did not change. Everything else (queueing, preempted, cancelled, failed, disaggregated, and each
instance's first requests, which may be cold) is left out and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from weighbridge.core.actions import Action, Dispatch, Reject
from weighbridge.core.events import (
    Event,
    FirstToken,
    InstanceDown,
    InstanceGone,
    InstanceUp,
    PrefillFinished,
    ProfileUpdated,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    TokensProgressed,
)
from weighbridge.core.instance import InstanceSpec
from weighbridge.cost.online import DecodeSample, OnlineCost, PrefillSample, first_estimate

COLD_REQUESTS = 1
"""An instance's first requests after it came up are not learned from."""
KEPT = 32
"""Observations kept of an instance without any model, towards a first estimate."""
LEAST_STEPS = 8
"""Fewer decode steps tell too little where reports fall between tokens."""
TELL_EVERY_S = 5.0
LOOK_EVERY_S = 0.1


class _Running:
    __slots__ = ("alone", "cold", "dispatched_s", "first_s", "prompt_tokens", "seen_s", "seen_tokens", "watched")

    def __init__(self, watched: _Watched, prompt_tokens: int, dispatched_s: float, *, alone: bool, cold: bool) -> None:
        self.watched = watched
        self.prompt_tokens = prompt_tokens
        self.dispatched_s = dispatched_s
        self.alone = alone
        self.cold = cold
        self.first_s: float | None = None
        self.seen_tokens = 1
        self.seen_s = 0.0


class _Watched:
    """One instance. The sums over `running` are kept as it changes: walking it at every event costs O(batch)."""

    __slots__ = (
        "alone",
        "changed_s",
        "cost",
        "decodes",
        "generation",
        "kv_tokens",
        "looked_s",
        "prefilling",
        "prefills",
        "running",
        "served",
        "spec",
        "told",
        "told_s",
    )

    def __init__(self, spec: InstanceSpec, cost: OnlineCost | None, generation: int) -> None:
        self.spec = spec
        self.cost = cost
        self.generation = generation
        self.served = 0
        self.changed_s = 0.0
        self.told_s = self.looked_s = float("-inf")
        self.told: ProfileUpdated | None = None
        self.prefills: deque[PrefillSample] = deque(maxlen=KEPT)
        self.decodes: deque[DecodeSample] = deque(maxlen=KEPT)
        self.running: dict[str, _Running] = {}
        self.prefilling = 0
        """How many of `running` have given no token."""
        self.kv_tokens = 0
        """Prompt and seen output tokens of `running`."""
        self.alone: _Running | None = None
        """The one that found nothing running and has given no token; there is never a second such."""

    def add(self, request_id: str, prompt_tokens: int, now_s: float) -> _Running:
        """A request was sent here."""
        if self.alone is not None:
            self.alone.alone = False
            self.alone = None
        alone = not self.running
        running = _Running(self, prompt_tokens, now_s, alone=alone, cold=self.served < COLD_REQUESTS)
        self.running[request_id] = running
        if alone:
            self.alone = running
        self.served += 1
        self.prefilling += 1
        self.kv_tokens += prompt_tokens + 1
        self.changed_s = now_s
        return running

    def first(self, running: _Running, now_s: float) -> None:
        """A request's first token came."""
        if running.first_s is None:
            self.prefilling -= 1
            if self.alone is running:
                self.alone = None
        running.first_s = running.seen_s = now_s
        self.changed_s = now_s

    def seen(self, running: _Running, output_tokens: int, now_s: float) -> None:
        """A request has this many tokens."""
        self.kv_tokens += output_tokens - running.seen_tokens
        running.seen_tokens, running.seen_s = output_tokens, now_s

    def remove(self, request_id: str, now_s: float) -> None:
        """A request runs here no more."""
        running = self.running.pop(request_id)
        if running.first_s is None:
            self.prefilling -= 1
        if self.alone is running:
            self.alone = None
        self.kv_tokens -= running.prompt_tokens + running.seen_tokens
        self.changed_s = now_s

    def observe(self, sample: PrefillSample | DecodeSample) -> None:
        """Refine the model or, where there is none yet, gather towards a first one."""
        if self.cost is None:
            if isinstance(sample, PrefillSample):
                self.prefills.append(sample)
            else:
                self.decodes.append(sample)
            step = first_estimate(self.prefills, self.decodes)
            if step is not None:
                budget = self.spec.limits.token_budget
                self.cost = OnlineCost(step, None, None, token_budget=budget, level="online")
        elif isinstance(sample, PrefillSample):
            self.cost.observe_prefill(sample)
        else:
            self.cost.observe_decode(sample)

    def exclude(self) -> None:
        """Count what is not clean."""
        if self.cost is not None:
            self.cost.exclude()


class Refinement:
    """Learns from events; pure, so that a replayed log refines alike."""

    def __init__(self) -> None:
        self._instances: dict[str, _Watched] = {}
        self._prompts: dict[str, int] = {}
        self._running: dict[str, _Running] = {}
        self._handlers: dict[type, Callable[[Any, float], _Watched | None]] = {
            RequestArrived: self._on_arrived,
            FirstToken: self._on_first,
            TokensProgressed: self._on_progress,
            RequestFinished: self._on_finish,
            RequestFailed: self._on_failed,
            RequestCancelled: self._on_cancelled,
            PrefillFinished: self._on_prefilled,
            ProfileUpdated: self._recalibrated,
            InstanceUp: self._on_up,
            InstanceDown: self._on_down,
            InstanceGone: self._on_gone,
        }

    def cost(self, instance: str) -> OnlineCost | None:
        """The refined model of an instance; None where it is unknown or has nothing to refine."""
        watched = self._instances.get(instance)
        return None if watched is None else watched.cost

    def observe(self, event: Event, actions: Iterable[Action], now_s: float) -> list[ProfileUpdated]:
        """Take one event and the router's answer to it; returns updates that the router should be fed."""
        handler = self._handlers.get(type(event))
        watched = handler(event, now_s) if handler is not None else None
        for action in actions:
            if isinstance(action, Dispatch):
                self._on_dispatch(action, now_s)
            elif isinstance(action, Reject):
                self._prompts.pop(action.request_id, None)
        return [] if watched is None else self._tell(watched, now_s)

    def _on_arrived(self, event: RequestArrived, now_s: float) -> None:
        self._prompts[event.request.id] = event.request.prompt_tokens

    def _on_failed(self, event: RequestFailed, now_s: float) -> None:
        self._drop(event.request_id, now_s, final=not event.retriable)

    def _on_cancelled(self, event: RequestCancelled, now_s: float) -> None:
        self._drop(event.request_id, now_s, final=True)

    def _on_prefilled(self, event: PrefillFinished, now_s: float) -> None:
        self._drop(event.request_id, now_s, final=False)

    def _on_up(self, event: InstanceUp, now_s: float) -> None:
        self._up(event.spec, event.generation)

    def _on_down(self, event: InstanceDown, now_s: float) -> None:
        if not event.drain:
            self._down(event.instance)

    def _on_gone(self, event: InstanceGone, now_s: float) -> None:
        self._down(event.instance)

    def _up(self, spec: InstanceSpec, generation: int) -> None:
        cost = None
        if spec.step is not None or spec.rates is not None:
            cost = OnlineCost(spec.step, spec.rates, spec.error, token_budget=spec.limits.token_budget)
        self._down(spec.name)
        self._instances[spec.name] = _Watched(spec, cost, generation)

    def _recalibrated(self, event: ProfileUpdated, now_s: float) -> None:
        """Somebody else has a new profile: start anew from it."""
        watched = self._instances.get(event.instance)
        if watched is not None and event != watched.told:
            known = event.step is not None or event.rates is not None
            budget = watched.spec.limits.token_budget
            watched.cost = OnlineCost(event.step, event.rates, event.error, token_budget=budget) if known else None

    def _down(self, name: str) -> None:
        watched = self._instances.pop(name, None)
        for request_id in watched.running if watched is not None else ():
            self._running.pop(request_id, None)

    def _on_dispatch(self, action: Dispatch, now_s: float) -> None:
        request_id = action.request_id
        self._drop(request_id, now_s, final=False)
        watched = self._instances.get(action.instance)
        if watched is None or action.leg != "whole":
            return
        self._running[request_id] = watched.add(request_id, self._prompts.get(request_id, 0), now_s)

    def _on_first(self, event: FirstToken, now_s: float) -> None:
        running = self._running.get(event.request_id)
        if running is not None:
            running.watched.first(running, now_s)

    def _on_progress(self, event: TokensProgressed, now_s: float) -> _Watched | None:
        running = self._running.get(event.request_id)
        if running is None or running.first_s is None:
            return None
        self._decode_sample(running.watched, running, event.output_tokens, now_s)
        return running.watched

    def _on_finish(self, event: RequestFinished, now_s: float) -> _Watched | None:
        running = self._running.get(event.request_id)
        if running is None:
            self._prompts.pop(event.request_id, None)
            return None
        watched = running.watched
        if running.first_s is not None:
            self._decode_sample(watched, running, event.output_tokens, now_s)
            prompt = event.prompt_tokens if event.prompt_tokens is not None else running.prompt_tokens
            uncached = prompt - (event.cached_tokens or 0)
            if running.alone and not running.cold and uncached > 0:
                watched.observe(PrefillSample(uncached, running.first_s - running.dispatched_s))
            else:
                watched.exclude()
        self._drop(event.request_id, now_s, final=True)
        return watched

    def _decode_sample(self, watched: _Watched, running: _Running, output_tokens: int, now_s: float) -> None:
        steps = output_tokens - running.seen_tokens
        # one request speaks for its batch: the others' tokens come from the same steps
        leads = running is next(iter(watched.running.values()))
        steady = leads and watched.changed_s <= running.seen_s and not watched.prefilling
        if steady and steps < LEAST_STEPS:
            return  # too few yet: wait for more from the same moment on
        if steady:
            if running.cold:
                watched.exclude()
            else:
                kv = watched.kv_tokens + len(watched.running) * steps // 2
                seconds = now_s - running.seen_s
                watched.observe(DecodeSample(steps, len(watched.running), kv, seconds))
        watched.seen(running, output_tokens, now_s)

    def _drop(self, request_id: str, now_s: float, *, final: bool) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:
            running.watched.remove(request_id, now_s)
        if final:
            self._prompts.pop(request_id, None)

    def _tell(self, watched: _Watched, now_s: float) -> list[ProfileUpdated]:
        cost = watched.cost
        if cost is None or now_s - watched.told_s < TELL_EVERY_S or now_s - watched.looked_s < LOOK_EVERY_S:
            return []
        watched.looked_s = now_s
        if not cost.news():
            return []
        watched.told_s = now_s
        step = cost.step if cost.has_step else None
        watched.told = ProfileUpdated(instance=watched.spec.name, rates=cost.rates, step=step, error=cost.error)
        return [watched.told]
